"""Moves messages, objects and KV-cache blocks between processes through shared memory.

MessageQueue                  one writer, many readers: each message once, in order
Gather                        many writers, one reader: in order of each, and of all in turn
SingleWriterShmObjectStorage  objects in a SingleWriterShmRingBuffer: put once, read by all
WorkerGroup                   worker processes as one object: calls out, answers back by rank
SharedOffloadRegion           KV-cache blocks in host memory; copy_blocks moves them

The manual (docs/index.md) has a program for each. The errors of memlane are MemlaneErrors; what
your own code raises while a message is encoded or decoded reaches you unchanged.

SIGTERM, SIGHUP and SIGQUIT end Python without running finalizers, so nothing is closed. A segment
that still has a name in /dev/shm keeps it until the last attached process leaves or the next
segment is created. (A queue's name is removed once the queue is ready.) A region's file stays until
the next start with the same id.
memlane installs no signal handlers; install one that raises SystemExit:

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
"""

import os
import sys

from memlane._importing import fork_waits

if sys.platform != "linux":
    raise ImportError("memlane runs on Linux only: it is built on futexes and Linux file locks")
# Checked here: Python 3.13 always initializes the native module in the main interpreter.
if sys.version_info >= (3, 13):
    from _thread import _is_main_interpreter
else:
    from _xxsubinterpreters import get_current, get_main  # type: ignore[import-not-found]

    def _is_main_interpreter() -> bool:
        return bool(get_current() == get_main())


if not _is_main_interpreter():
    raise ImportError("memlane runs in the main interpreter of a process only")
# Importing the native module enables the GIL, unless that is forbidden.
if not getattr(sys, "_is_gil_enabled", lambda: True)() and "0" in (
    sys._xoptions.get("gil"),
    os.environ.get("PYTHON_GIL"),
):
    raise ImportError("memlane needs the GIL: unset PYTHON_GIL, or set it to 1")

TYPE_CHECKING = False  # as type checkers know it, without the cost of importing typing
if TYPE_CHECKING:
    from typing import Any

    from memlane.broadcast import (
        Gather,
        GatherHandle,
        GatherStatistics,
        Handle,
        MessageQueue,
        QueueStatistics,
        ReaderStatistics,
        ShmRingBuffer,
        WriterStatistics,
        first_ready,
        in_the_same_node_as,
    )
    from memlane.errors import (
        AccessDenied,
        AccessRefused,
        CallTimedOut,
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
        NameTaken,
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
        TierInUse,
        TimedOut,
        UnknownKey,
        Unsupported,
        ViewInUse,
        WorkerDied,
        WorkerError,
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
    from memlane.workers import (
        Call,
        Stored,
        Stream,
        Ticket,
        WorkerGroup,
        Workers,
        WorkersStore,
        as_completed,
        serve,
    )

__version__ = "0.1.0"

__all__ = [
    "AccessDenied",
    "AccessRefused",
    "BlockTransfer",
    "Call",
    "CallTimedOut",
    "Cancelled",
    "Closed",
    "ConcurrentUse",
    "CopyFailed",
    "CorruptMessage",
    "Gather",
    "GatherHandle",
    "GatherStatistics",
    "GroupFailed",
    "Handle",
    "InvalidArgument",
    "InvalidType",
    "LayoutMismatch",
    "MemlaneError",
    "MessageQueue",
    "MsgpackSerde",
    "NameTaken",
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
    "Stored",
    "Stream",
    "SystemFault",
    "Ticket",
    "TierInUse",
    "TimedOut",
    "UnknownKey",
    "Unsupported",
    "ViewInUse",
    "WorkerDied",
    "WorkerError",
    "WorkerGroup",
    "Workers",
    "WorkersStore",
    "WriterClosed",
    "WriterDied",
    "WriterStatistics",
    "WriterUnreachable",
    "WrongProcess",
    "WrongRole",
    "__version__",
    "as_completed",
    "copy_blocks",
    "first_ready",
    "in_the_same_node_as",
    "serve",
]

_SYSTEMS = ("broadcast", "errors", "groups", "offload", "store", "workers")
_HOMES = {  # of the names that are not errors
    "BlockTransfer": "offload",
    "Call": "workers",
    "Gather": "broadcast",
    "GatherHandle": "broadcast",
    "GatherStatistics": "broadcast",
    "Handle": "broadcast",
    "MessageQueue": "broadcast",
    "MsgpackSerde": "store",
    "ObjectSerde": "store",
    "PickleMsgpackSerde": "store",
    "QueueStatistics": "broadcast",
    "ReaderStatistics": "broadcast",
    "SharedOffloadRegion": "offload",
    "ShmObjectStorageHandle": "store",
    "ShmRingBuffer": "broadcast",
    "SingleWriterShmObjectStorage": "store",
    "SingleWriterShmRingBuffer": "store",
    "StoreBlocker": "store",
    "StoreReaderStatistics": "store",
    "StoreStatistics": "store",
    "Stored": "workers",
    "Stream": "workers",
    "Ticket": "workers",
    "WorkerGroup": "workers",
    "Workers": "workers",
    "WorkersStore": "workers",
    "WriterStatistics": "broadcast",
    "copy_blocks": "offload",
    "first_ready": "broadcast",
    "in_the_same_node_as": "broadcast",
    "as_completed": "workers",
    "serve": "workers",
}


def __getattr__(name: str) -> "Any":
    """Imports what `name` needs when it is first used: the import of memlane itself is free."""
    if name not in _SYSTEMS and name not in __all__:
        raise AttributeError(f"module 'memlane' has no attribute {name!r}")
    with fork_waits:
        # numpy imports datetime from C code, where an interrupt would become an ImportError.
        import datetime  # noqa: F401
        from importlib import import_module

        if name in _SYSTEMS:
            return import_module(f"memlane.{name}")
        value = getattr(import_module(f"memlane.{_HOMES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> "list[str]":
    return sorted({*globals(), *__all__, *_SYSTEMS})
