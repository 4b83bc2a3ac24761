"""What queues of engines have beyond memlane's own: whom they work with, and groups of torch."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist

import memlane
from memlane.engines import _colleagues
from memlane.engines._colleagues import Watch
from memlane.engines._handles import EngineHandle, not_switched
from memlane.errors import InvalidType

if TYPE_CHECKING:
    from typing import Self


class EngineQueue(memlane.MessageQueue):
    """The base of each engine's class."""

    VARIABLE: ClassVar[str]

    @staticmethod
    def same_node(pg: Any, source_rank: int) -> list[bool]:
        """The engine's own way to find who shares memory with a rank, which all ranks take."""
        raise NotImplementedError

    def _setup(self, handle: memlane.Handle, *args: Any) -> None:
        super()._setup(handle, *args)
        self._watch = Watch(handle.reads if isinstance(handle, EngineHandle) else [])
        ends = _colleagues.written if self._is_writer else _colleagues.read
        ends[handle.queue_id] = self

    def export_handle(self, rank: int | None = None) -> EngineHandle:
        """A reader hands on what it attached by."""
        handle = super().export_handle(rank) if self._is_writer else self.handle
        if isinstance(handle, EngineHandle):
            return handle
        known = {field.name: getattr(handle, field.name) for field in fields(memlane.Handle)}
        reads = sorted(_colleagues.ids_read() - {handle.queue_id})
        return EngineHandle(**known, variable=self.VARIABLE, reads=reads)

    @classmethod
    def create_from_handle(
        cls, handle: memlane.Handle, rank: int, *, timeout: float | None = None
    ) -> Self:
        """As memlane's, of a handle that came from this class."""
        if not isinstance(handle, EngineHandle):
            raise InvalidType(not_switched(repr(type(handle)), cls.VARIABLE, "queue"))
        return super().create_from_handle(handle, rank, timeout=timeout)

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

        With an external handle, which `writer_rank` alone has, that rank is a reader, too. The
        handle travels as engines send theirs, so that a rank with the engine's own queue is found.
        """
        rank = dist.get_rank(pg) if isinstance(pg, dist.ProcessGroup) else pg.rank
        is_here = cls.same_node(pg, writer_rank)
        if rank != writer_rank:
            queue = cls.create_from_handle(_shared(pg, None, writer_rank), rank)
        else:
            if external_writer_handle is None:
                local = [other for other, here in enumerate(is_here) if here and other != rank]
                sizes = (max_chunk_bytes, max_chunks)
                queue = cls(len(is_here) - 1, len(local), local, *sizes)
            else:
                queue = cls.create_from_handle(external_writer_handle, rank)
            _shared(pg, queue.export_handle(), writer_rank)
        if blocking:
            queue.wait_until_ready()
        return queue


def _shared(pg: Any, handle: EngineHandle | None, source: int) -> Any:
    """The handle of rank `source`, on all ranks."""
    if not isinstance(pg, dist.ProcessGroup):
        return pg.broadcast_obj(handle, source)
    box = [handle]
    dist.broadcast_object_list(box, src=dist.get_global_rank(pg, source), group=pg)
    return box[0]
