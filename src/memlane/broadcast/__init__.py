"""Broadcast: one writer, N readers, every reader gets every message in order."""

from memlane.broadcast.grouping import in_the_same_node_as
from memlane.broadcast.handle import Handle
from memlane.broadcast.queue import MessageQueue
from memlane.broadcast.ready import first_ready
from memlane.broadcast.ring import ShmRingBuffer
from memlane.broadcast.statistics import QueueStatistics, ReaderStatistics

__all__ = [
    "Handle",
    "MessageQueue",
    "QueueStatistics",
    "ReaderStatistics",
    "ShmRingBuffer",
    "first_ready",
    "in_the_same_node_as",
]
