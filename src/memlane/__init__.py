"""memlane: the shared-memory data plane of multi-process Python engines."""

import sys

if sys.platform != "linux":
    raise ImportError("memlane runs on Linux only: it is built on futexes and Linux file locks")

from memlane.broadcast import (
    Handle,
    MessageQueue,
    QueueStatistics,
    ReaderStatistics,
    ShmRingBuffer,
)
from memlane.errors import (
    Cancelled,
    Closed,
    ConcurrentUse,
    CorruptMessage,
    InvalidArgument,
    InvalidType,
    LayoutMismatch,
    MemlaneError,
    RankTaken,
    ReaderDied,
    SegmentMissing,
    SegmentRefused,
    ShmExhausted,
    SystemFault,
    TimedOut,
    Unsupported,
    ViewInUse,
    WriterClosed,
    WriterDied,
    WrongProcess,
    WrongRole,
)

__all__ = [
    "Cancelled",
    "Closed",
    "ConcurrentUse",
    "CorruptMessage",
    "Handle",
    "InvalidArgument",
    "InvalidType",
    "LayoutMismatch",
    "MemlaneError",
    "MessageQueue",
    "QueueStatistics",
    "RankTaken",
    "ReaderDied",
    "ReaderStatistics",
    "SegmentMissing",
    "SegmentRefused",
    "ShmExhausted",
    "ShmRingBuffer",
    "SystemFault",
    "TimedOut",
    "Unsupported",
    "ViewInUse",
    "WriterClosed",
    "WriterDied",
    "WrongProcess",
    "WrongRole",
]
