"""Moves messages, objects and KV-cache blocks between processes through shared memory.

MessageQueue                  one writer, many readers: each message once, in order
SingleWriterShmObjectStorage  objects in a SingleWriterShmRingBuffer: put once, read by all
SharedOffloadRegion           KV-cache blocks in host memory; copy_blocks moves them

docs/guide.md has a program for each. Every error is a MemlaneError.

SIGTERM, SIGHUP and SIGQUIT end Python without running finalizers, so nothing is closed. A segment
that still has a name in /dev/shm keeps it until the last attached process leaves or the next
segment is created. (A queue's name is removed once the queue is ready.) A region's file stays until
the next start with the same id.
memlane installs no signal handlers; install one that raises SystemExit:

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
"""

import _thread
import sys

if sys.platform != "linux":
    raise ImportError("memlane runs on Linux only: it is built on futexes and Linux file locks")
# The native module cannot tell: Python 3.13 always initializes it in the main interpreter.
if not getattr(_thread, "_is_main_interpreter", lambda: True)():
    raise ImportError("memlane runs in the main interpreter of a process only")

from memlane.broadcast import (
    Handle,
    MessageQueue,
    QueueStatistics,
    ReaderStatistics,
    ShmRingBuffer,
    in_the_same_node_as,
)
from memlane.errors import (
    AccessDenied,
    AccessRefused,
    Cancelled,
    Closed,
    ConcurrentUse,
    CopyFailed,
    CorruptMessage,
    GroupFailed,
    InvalidArgument,
    InvalidType,
    LayoutMismatch,
    MemlaneError,
    ObjectGone,
    OutOfMemory,
    OutsideCell,
    PairRefused,
    PeerDied,
    RankMissing,
    RankTaken,
    ReaderDied,
    ReaderGivenUp,
    SegmentExists,
    SegmentMissing,
    SegmentRefused,
    ShmExhausted,
    SpaceHolder,
    StoreFull,
    SystemFault,
    TimedOut,
    UnknownKey,
    Unsupported,
    ViewInUse,
    WriterClosed,
    WriterDied,
    WriterUnreachable,
    WrongProcess,
    WrongRole,
)
from memlane.offload import BlockTransfer, SharedOffloadRegion, copy_blocks
from memlane.store import (
    MsgpackSerde,
    ObjectSerde,
    PickleMsgpackSerde,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
    StoreBlocker,
    StoreReaderStatistics,
    StoreStatistics,
)

# Checked last: importing the native module enables the GIL unless PYTHON_GIL=0 forbids that.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("memlane needs the GIL: unset PYTHON_GIL, or set it to 1")

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AccessRefused",
    "BlockTransfer",
    "Cancelled",
    "Closed",
    "ConcurrentUse",
    "CopyFailed",
    "CorruptMessage",
    "GroupFailed",
    "Handle",
    "InvalidArgument",
    "InvalidType",
    "LayoutMismatch",
    "MemlaneError",
    "MessageQueue",
    "MsgpackSerde",
    "ObjectGone",
    "ObjectSerde",
    "OutOfMemory",
    "OutsideCell",
    "PairRefused",
    "PeerDied",
    "PickleMsgpackSerde",
    "QueueStatistics",
    "RankMissing",
    "RankTaken",
    "ReaderDied",
    "ReaderGivenUp",
    "ReaderStatistics",
    "SegmentExists",
    "SegmentMissing",
    "SegmentRefused",
    "SharedOffloadRegion",
    "ShmExhausted",
    "ShmObjectStorageHandle",
    "ShmRingBuffer",
    "SingleWriterShmObjectStorage",
    "SingleWriterShmRingBuffer",
    "SpaceHolder",
    "StoreBlocker",
    "StoreFull",
    "StoreReaderStatistics",
    "StoreStatistics",
    "SystemFault",
    "TimedOut",
    "UnknownKey",
    "Unsupported",
    "ViewInUse",
    "WriterClosed",
    "WriterDied",
    "WriterUnreachable",
    "WrongProcess",
    "WrongRole",
    "__version__",
    "copy_blocks",
    "in_the_same_node_as",
]
