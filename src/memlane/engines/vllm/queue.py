"""vLLM's MessageQueue (`distributed/device_communicators/shm_broadcast.py`), by memlane's.

Only what vLLM's callers see; the queue itself is `memlane.MessageQueue`.
"""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from vllm.utils.network_utils import get_ip

from memlane.engines._handles import EngineHandle
from memlane.engines._queue import EngineQueue
from memlane.engines._replacing import Replacement
from memlane.engines.vllm._engine import VLLM
from memlane.engines.vllm._executor import one_at_a_time
from memlane.errors import InvalidArgument, RankTaken

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from typing import Self

    import memlane


class MessageQueue(EngineQueue):
    """The constructor, the calls and the attributes that vLLM's engine, executors and groups use.

    `enable_shm_tensor_arena` is accepted: tensors travel as everything does, each reader gets a
    copy of its own.
    """

    VARIABLE = VLLM.variable

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: Sequence[int] | None = None,
        max_chunk_bytes: int = 24 * 1024 * 1024,
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,
    ) -> None:
        if n_reader > n_local_reader:
            connect_ip = connect_ip or get_ip()  # which VLLM_HOST_IP decides
        super().__init__(
            n_reader,
            n_local_reader,
            local_reader_ranks,
            max_chunk_bytes,
            max_chunks,
            connect_ip,
            keep_readonly=True,
        )

    def _setup(self, handle: memlane.Handle, *args: Any) -> None:
        super()._setup(handle, *args)
        self.shutting_down = False
        self.tensor_arena = None

    @classmethod
    def create_from_handle(
        cls, handle: memlane.Handle, rank: int, *, timeout: float | None = None
    ) -> Self:
        """Rank -1 is whichever remote place is free."""
        if rank != -1:
            return super().create_from_handle(handle, rank, timeout=timeout)
        refused: Exception = InvalidArgument("the queue has no remote readers: rank -1 is none")
        free = (number for number in count() if number not in handle.local_reader_ranks)
        for number in islice(free, handle.n_remote_reader):
            try:
                return super().create_from_handle(handle, number, timeout=timeout)
            except RankTaken as error:
                refused = error
        raise refused

    @staticmethod
    def same_node(pg: Any, source_rank: int) -> list[bool]:
        from vllm.distributed.parallel_state import in_the_same_node_as

        return list(in_the_same_node_as(pg, source_rank=source_rank))

    @classmethod
    def create_from_process_group_single_reader(
        cls,
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
    ) -> tuple[Self, list[EngineHandle]]:
        """Every rank writes a queue of its own to one reader, which gets all handles.

        Ranks are global ones. Which of them are local is concluded from the devices per node, not
        tried: executors expect addresses of all others, also where nodes share their memory.
        """
        from vllm.platforms import current_platform
        from vllm.platforms.interface import get_assigned_physical_gpu_ids

        devices = get_assigned_physical_gpu_ids()
        per_node = current_platform.device_count() if devices is None else len(devices)
        rank = dist.get_rank()
        is_local = rank // per_node == reader_rank // per_node
        queue = cls(1, int(is_local), None, max_chunk_bytes, max_chunks)
        handles: list[Any] = [None] * dist.get_world_size(pg) if rank == reader_rank else []
        dist.gather_object(queue.export_handle(), handles or None, dst=reader_rank, group=pg)
        if blocking:
            queue.wait_until_ready()
        return queue, handles

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:  # type: ignore[override]
        """As memlane's, until `shutdown()`. `indefinite`: the wait is idle, and says nothing.

        Raises also:
            ReaderDied: another worker died that the awaited one works with.
        """
        self._watch.begin(indefinite)
        return super().dequeue(timeout, self._watch)  # type: ignore[arg-type]

    def acquire_read(  # type: ignore[override]
        self, timeout: float | None = None, indefinite: bool = False
    ) -> AbstractContextManager[memoryview]:
        """As `dequeue`."""
        self._watch.begin(indefinite)
        return super().acquire_read(timeout, self._watch)  # type: ignore[arg-type]

    def shutdown(self) -> None:
        """From any thread: a call that waits for a message ends ("cancelled"), and so do all later
        ones. The peers hear nothing; they see a death when the process ends."""
        self.shutting_down = self._watch.is_shut_down = True


def replacements() -> list[Replacement]:
    """What is replaced in this process."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    return [
        Replacement(
            "vllm.distributed.device_communicators.shm_broadcast", "MessageQueue", MessageQueue
        ),
        Replacement(
            "vllm.v1.executor.multiproc_executor",
            "MultiprocExecutor.shutdown",
            one_at_a_time(MultiprocExecutor.shutdown),
        ),
    ]
