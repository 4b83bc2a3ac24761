"""MessageQueue as engines know it. All their copies descend from one and differ in their imports.

Holds only what engines call beyond memlane's API; the queue itself is `memlane.MessageQueue`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count, islice
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch.distributed as dist

import memlane
from memlane._base import processes
from memlane._base.blame import VLLM_WORDS, Facts, listed, role_name
from memlane._base.diagnosis import blocked, warning_interval
from memlane._base.slots import facts_of
from memlane.engines._switching import Engine
from memlane.errors import InvalidArgument, InvalidType, RankTaken, ReaderDied, WriterDied

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from typing import Self

logger = logging.getLogger("memlane")

_SHORT = 0.05  # seconds; shorter waits do not check the other workers
_LONGEST_PAUSE = 60.0  # seconds between two log lines


@dataclass
class EngineHandle(memlane.Handle):
    """A handle that processes with the engine's own queue refuse to unpickle."""

    engine: Engine | None = None

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], EngineHandle], tuple[dict[str, Any]]]:
        return _arrived, (vars(self),)


def _arrived(fields: dict[str, Any]) -> EngineHandle:
    fields["engine"].check_arrival("queue")
    return EngineHandle(**fields)


class EngineQueue(memlane.MessageQueue):
    """The calls and attributes that engines, their executors and groups use.

    `enable_shm_tensor_arena` is accepted and has no effect: large tensors are always lent.
    """

    ENGINE: ClassVar[Engine]

    shutting_down = False
    tensor_arena = None
    # Set on queues that carry a worker's answers: its rank, and the queue that carries its work.
    # Each answer needs all workers, so a process that waits for one must learn of any death.
    worker = -1
    work: EngineQueue | None = None

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
            connect_ip = connect_ip or resolve_name(self.ENGINE.own_address)()
        super().__init__(
            n_reader,
            n_local_reader,
            local_reader_ranks,
            max_chunk_bytes,
            max_chunks,
            connect_ip,
            keep_readonly=True,
        )

    def _setup(self, handle: memlane.Handle, *ends: Any) -> None:
        super()._setup(handle, *ends)
        self.handle = EngineHandle(**{**vars(handle), "engine": self.ENGINE})

    def export_handle(self, rank: int | None = None) -> EngineHandle:
        """On a reader: the handle that it attached with."""
        handle = super().export_handle(rank) if self._is_writer else replace(self.handle, rank=None)
        return cast("EngineHandle", handle)

    @classmethod
    def create_from_handle(
        cls, handle: memlane.Handle, rank: int | None = None, *, timeout: float | None = None
    ) -> Self:
        """Is memlane's, for handles of this class. Rank -1 takes any free remote place."""
        if not isinstance(handle, EngineHandle):
            raise InvalidType(cls.ENGINE.not_switched(repr(type(handle)), "queue"))
        if rank == -1 and handle.rank is not None:
            rank = None
        if rank != -1:
            return super().create_from_handle(handle, rank, timeout=timeout)
        refused: Exception = InvalidArgument(
            "rank -1 is any remote place, but the queue has no remote readers"
        )
        free = (number for number in count() if number not in handle.local_reader_ranks)
        for number in islice(free, handle.n_remote_reader):
            try:
                return super().create_from_handle(handle, number, timeout=timeout)
            except RankTaken as error:
                refused = error
        raise refused

    @classmethod
    def create_from_process_group(  # type: ignore[override]
        cls,
        pg: Any,
        max_chunk_bytes: int,
        max_chunks: int,
        writer_rank: int = 0,
        external_writer_handle: EngineHandle | None = None,
        blocking: bool = True,
    ) -> Self:
        """One writer; all other ranks of torch's group, or of an engine's stateless one, read.

        An external handle, which only `writer_rank` has, makes that rank a reader, too. Handles are
        sent the way engines send theirs, which exposes a rank that has the engine's own queue.
        """
        rank = dist.get_rank(pg) if isinstance(pg, dist.ProcessGroup) else pg.rank
        is_here = list(resolve_name(cls.ENGINE.same_node)(pg, writer_rank))
        if rank != writer_rank:
            queue = cls.create_from_handle(_shared(pg, None, writer_rank), rank)
        else:
            if external_writer_handle is None:
                local = [other for other, here in enumerate(is_here) if here and other != rank]
                sizes = (max_chunk_bytes, max_chunks)
                queue = cls(len(is_here) - 1, len(local), local, *sizes)
                queue.name = f"{cls.ENGINE.name.lower()}.group"
            else:
                queue = cls.create_from_handle(external_writer_handle, rank)
            _shared(pg, queue.export_handle(), writer_rank)
        if blocking:
            queue.wait_until_ready()
        return queue

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:  # type: ignore[override]
        """Is memlane's, until `shutdown()`. With `indefinite`, a long wait is not logged.

        Also raises:
            ReaderDied: the worker that should answer, or another one, died.
        """
        try:
            return super().dequeue(timeout, _Wait(self, indefinite))  # type: ignore[arg-type]
        except WriterDied as error:
            if self.work is None:
                raise
            raise ReaderDied(self.worker, error.pid, " while its answer was awaited") from None

    def acquire_read(  # type: ignore[override]
        self, timeout: float | None = None, indefinite: bool = False
    ) -> AbstractContextManager[memoryview]:
        """Takes `indefinite` as `dequeue` does."""
        return super().acquire_read(timeout, _Wait(self, indefinite))  # type: ignore[arg-type]

    def shutdown(self) -> None:
        """Ends a blocked read and all later ones ("cancelled"); from any thread. The peers are not
        told: they see a death when the process ends."""
        self.shutting_down = True


def _shared(pg: Any, handle: EngineHandle | None, source: int) -> Any:
    """Returns the handle of rank `source` on all ranks."""
    if not isinstance(pg, dist.ProcessGroup):
        return pg.broadcast_obj(handle, source)
    box = [handle]
    dist.broadcast_object_list(box, src=dist.get_global_rank(pg, source), group=pg)
    return box[0]


class _Wait:
    """The `cancel` of a read, which polls it every 100 ms while it waits."""

    def __init__(self, queue: EngineQueue, is_idle: bool) -> None:
        self._queue, self._is_idle = queue, is_idle
        self._began, self._speaks_after = time.monotonic(), warning_interval()

    def is_set(self) -> bool:
        """Raises ReaderDied if a worker died; a message that has arrived is delivered first."""
        waited = time.monotonic() - self._began
        if self._queue.work is not None and waited >= _SHORT and not self._queue.shutting_down:
            self._look_at(list(self._queue.work.statistics().readers), waited)
        return self._queue.shutting_down

    def _look_at(self, workers: list[memlane.ReaderStatistics], waited: float) -> None:
        for who in workers:
            if who.state == "dead":
                raise ReaderDied(who.rank, who.pid or 0, " while the other workers wait for it")
        if self._is_idle or waited < self._speaks_after:
            return
        self._speaks_after += min(self._speaks_after, _LONGEST_PAUSE)
        now = time.monotonic()
        awaited = listed([_facts(who, now) for who in workers])
        logger.warning("%s", blocked("executor", waited, f"no answer{VLLM_WORDS}", awaited))


def _facts(who: memlane.ReaderStatistics, now: float) -> Facts:
    """Returns the facts by which a worker is blamed."""
    name, silent_for = role_name("reader", who.rank), now - (who.last_progress or now)
    if who.address is not None or who.pid is None:
        state = "lost" if who.state == "unknown" else who.state
        return Facts(name, state, who.pid, address=who.address or "", silent_for=silent_for)
    return facts_of(
        name,
        who.state,
        who.pid,
        processes.start_ticks(who.pid) or 0,
        activity="waiting" if who.is_waiting else "elsewhere",
        behind=who.behind,
        views=who.views,
        views_for=now - (who.views_since or now),
        silent_for=silent_for,
    )
