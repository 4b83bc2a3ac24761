"""Replaces vLLM's MessageQueue (`distributed/device_communicators/shm_broadcast.py`), and how the
executor that uses it starts and ends.
"""

from __future__ import annotations

import os
import threading
from functools import wraps
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from memlane._importing import fork_waits
from memlane.engines._queue import EngineQueue
from memlane.engines._replacing import Replacement
from memlane.engines.vllm._engine import VLLM

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from memlane.engines._queue import EngineHandle

# Seconds for surviving workers to end. They may be in a collective that the dead one never joins,
# where only SIGKILL ends them; vLLM sends it after nine seconds.
GRACE = 3.0
OWN_PATIENCE = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"  # takes precedence if set


class MessageQueue(EngineQueue):
    """The queue of vLLM's engine, executors and groups."""

    ENGINE = VLLM

    @classmethod
    def create_from_process_group_single_reader(
        cls,
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        reader_rank: int = 0,
        blocking: bool = False,
    ) -> tuple[Self, list[EngineHandle]]:
        """Every rank writes its own queue to one reader, which gets all handles.

        Ranks are global. Which are local follows from the devices per node and is not probed:
        executors expect addresses of all others, even where nodes share their memory.
        """
        with fork_waits:
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


def with_workers(executor: Any) -> None:
    """Names an executor's queues, tells those of answers which worker writes them, and wraps a
    `shutdown` of its own class (Ray's, whose module only those import that use it)."""
    if executor.rpc_broadcast_mq is not None:
        executor.rpc_broadcast_mq.name = "vllm.rpc_broadcast"
    for rank, answers in enumerate(executor.response_mqs):
        answers.worker, answers.work = rank, executor.rpc_broadcast_mq
        answers.name = f"vllm.response[{rank}]"
        if executor.rpc_broadcast_mq is not None:
            answers.answers(executor.rpc_broadcast_mq)
    kind = type(executor)
    if kind is not MultiprocExecutor and "shutdown" in vars(kind):
        kind.shutdown = one_at_a_time(kind.shutdown)


def one_at_a_time(shutdown: Callable[[Any], None]) -> Callable[[Any], None]:
    """Wraps an executor's `shutdown` in a lock of that executor.

    vLLM's own returns at once to a second caller. With memlane, the main thread of EngineCore
    learns of a death as early as the thread that monitors the workers. It would end the process
    before that thread has ended the surviving workers, which would remain as orphans. The monitor
    itself never waits: the executor of Ray joins it in its shutdown.
    """
    if hasattr(shutdown, "__wrapped__"):
        return shutdown

    @wraps(shutdown)
    def shut_down(executor: Any) -> None:
        # Re-entrant, because a signal handler may interrupt it and call it again.
        lock = vars(executor).setdefault("_memlane_shutdown_lock", threading.RLock())
        is_monitor = threading.current_thread() is getattr(executor, "_monitor_thread", None)
        if not lock.acquire(blocking=not is_monitor):
            return
        try:
            processes = [worker.proc for worker in getattr(executor, "workers", None) or ()]
            # A sentinel is ready as soon as its process begins to end, before it can be joined.
            ended = wait([process.sentinel for process in processes], 0)
            alive = [process for process in processes if process.sentinel not in ended]
            killing = threading.Timer(GRACE, lambda: [process.kill() for process in alive])
            if ended and OWN_PATIENCE not in os.environ:
                killing.start()
            try:
                shutdown(executor)
            finally:
                killing.cancel()
        finally:
            lock.release()

    return shut_down


def replacements() -> list[Replacement]:
    """The replacements for this process. `_post_init_executor` is an empty hook in vLLM."""
    executor, name = MultiprocExecutor.__module__, MultiprocExecutor.__name__
    shutdown = one_at_a_time(MultiprocExecutor.shutdown)
    home = "vllm.distributed.device_communicators.shm_broadcast"
    return [
        Replacement(home, "MessageQueue", MessageQueue),
        Replacement(executor, f"{name}._post_init_executor", with_workers),
        Replacement(executor, f"{name}.shutdown", shutdown),
    ]
