"""Broadcast: one writer, N readers, every reader gets every message in order."""

from memlane.broadcast.any_queue import first_ready
from memlane.broadcast.gather import Gather, GatherHandle
from memlane.broadcast.grouping import in_the_same_node_as
from memlane.broadcast.handle import Handle
from memlane.broadcast.queue import MessageQueue
from memlane.broadcast.ring import ShmRingBuffer
from memlane.broadcast.statistics import (
    GatherStatistics,
    QueueStatistics,
    ReaderStatistics,
    WriterStatistics,
)

__all__ = [
    "Gather",
    "GatherHandle",
    "GatherStatistics",
    "Handle",
    "MessageQueue",
    "QueueStatistics",
    "ReaderStatistics",
    "ShmRingBuffer",
    "WriterStatistics",
    "first_ready",
    "in_the_same_node_as",
]
