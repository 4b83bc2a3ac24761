"""Replaces SGLang's MessageQueue (`srt/distributed/device_communicators/shm_broadcast.py`).

SGLang creates it over a group and calls `broadcast_object`.
"""

from memlane.engines._queue import EngineQueue
from memlane.engines._replacing import Replacement
from memlane.engines.sglang._engine import SGLANG


class MessageQueue(EngineQueue):
    """The queue of SGLang's groups."""

    ENGINE = SGLANG


def replacements() -> list[Replacement]:
    """Returns the classes to replace in this process."""
    module = "sglang.srt.distributed.device_communicators.shm_broadcast"
    return [Replacement(module, "MessageQueue", MessageQueue)]
