"""SGLang's MessageQueue (`srt/distributed/device_communicators/shm_broadcast.py`), by memlane's.

SGLang makes it over a group and calls `broadcast_object`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlane.engines._queue import EngineQueue
from memlane.engines._replacing import Replacement
from memlane.engines.sglang._engine import SGLANG

if TYPE_CHECKING:
    from collections.abc import Sequence


class MessageQueue(EngineQueue):
    """With SGLang's constructor."""

    VARIABLE = SGLANG.variable

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 1024 * 1024 * 10,
        max_chunks: int = 10,
        connect_ip: str | None = None,
    ) -> None:
        if n_reader > n_local_reader and connect_ip is None:
            from sglang.srt.utils.network import get_local_ip_auto

            connect_ip = get_local_ip_auto()  # which SGLANG_HOST_IP decides
        super().__init__(
            n_reader,
            n_local_reader,
            local_reader_ranks,
            max_chunk_bytes,
            max_chunks,
            connect_ip,
            keep_readonly=True,
        )

    @staticmethod
    def same_node(pg: Any, source_rank: int) -> list[bool]:
        from sglang.srt.distributed.parallel_state import in_the_same_node_as

        return list(in_the_same_node_as(pg, source_rank=source_rank))


def replacements() -> list[Replacement]:
    """What is replaced in this process."""
    module = "sglang.srt.distributed.device_communicators.shm_broadcast"
    return [Replacement(module, "MessageQueue", MessageQueue)]
