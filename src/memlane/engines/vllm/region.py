"""Replaces vLLM's SharedOffloadRegion (`v1/kv_offload/cpu/shared_offload_region.py`).

Holds only what vLLM's callers use; `memlane.offload` manages space, pages and the file.
"""

from __future__ import annotations

import logging
import mmap
import weakref
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.cpu import shared_offload_region as vllms_own

import memlane
from memlane._base.arguments import integer, integer_from
from memlane._base.lifetime import undone_by
from memlane.engines._replacing import Replacement
from memlane.engines.vllm import _folder
from memlane.errors import InvalidArgument, InvalidType, OutsideCell
from memlane.offload._holding import Holding, file_name, share_of_cores
from memlane.offload._start import NOTHING, Part, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger("memlane")


class SharedOffloadRegion(memlane.SharedOffloadRegion):
    """With the constructor of vLLM 0.33, and `populate_only_on_creator` of 0.30 to 0.32.

    `num_segments` is accepted: several threads populate one file.
    """

    BLOCK_SIZE_ALIGNMENT = mmap.PAGESIZE

    # vLLM sets these, because it page-locks by itself.
    _base: Any = None
    is_pinned = False

    def __init__(
        self,
        engine_id: str,
        num_chunks: int,
        rank: int | None,
        kv_bytes_per_chunk: int,
        cpu_page_size: int,
        barrier: Callable[[], object] | None = None,
        *,
        creator_memory_check: Callable[[int], object] | None = None,
        populate_shard: tuple[int, int] | None = None,
        num_segments: int = 1,
        populate_only_on_creator: bool = False,
    ) -> None:
        if barrier is not None and not callable(barrier):
            raise InvalidType(f"barrier must be callable, not {type(barrier).__name__}")
        waiting = 0 if barrier is None else 1 if populate_shard is None else 2
        try:
            self.page_size = mmap.PAGESIZE
            self.num_chunks = self.num_blocks = integer_from("num_chunks", num_chunks, 1)
            self._row_stride = integer_from("kv_bytes_per_chunk", kv_bytes_per_chunk, 1)
            self.cpu_page_size = integer_from("cpu_page_size", cpu_page_size, 1)
            self.rank = None if rank is None else integer_from("rank", rank, 0)
            self.num_workers = self._row_stride // self.cpu_page_size
            self.total_size_bytes = self.num_chunks * self._row_stride
            self.pinned_addresses: list[int] = []
            self._canonical_offset = 0
            if self._row_stride % self.page_size:
                raise InvalidArgument(
                    f"kv_bytes_per_chunk {kv_bytes_per_chunk} is not a multiple of the page size "
                    f"{self.page_size}, and only whole pages can be page-locked"
                )
            if populate_only_on_creator and barrier is None:
                raise InvalidArgument("populate_only_on_creator needs a barrier")
            parts, sharing = self._parts(populate_shard, populate_only_on_creator)
            folder = f"/dev/shm/{file_name('engine_id', engine_id, 'vllm_offload_')}"
            self.mmap_path = f"{folder}/{_folder.FILE}"
            place = (folder, self.mmap_path, self.total_size_bytes)
            threads = share_of_cores(sharing)
            plan = Plan(
                *(*place, *parts, threads, "auto"), check=creator_memory_check, label="vllm.offload"
            )
            # Holders must agree on rows, not on how each divides them.
            sizes = (self.num_chunks, self._row_stride, self._row_stride)
            self._hold(_folder.within(folder, lambda: Holding(_folder.FILE, *sizes, plan)))
            self._end = weakref.finalize(self, _leave, self._holding, folder)
            with undone_by(self.cleanup):
                self._base = torch.frombuffer(self._file.memory(), dtype=torch.int8)
                while barrier is not None and waiting:
                    waiting -= 1
                    barrier()
                if barrier is not None:
                    self._creator = False
                    self._holding.remove_name()
                    _folder.remove(folder)
        except Exception as error:  # an interrupt must not wait for peers
            while barrier is not None and waiting:
                waiting -= 1
                _join(barrier, rank, error)
            raise

    def _parts(
        self, shard: tuple[int, int] | None, is_creators: bool
    ) -> tuple[tuple[Part, Part], int]:
        """Returns what this process populates as creator and as joiner, and how many do so at
        once."""
        whole = Part(0, self.total_size_bytes, 0, 1)
        if self.rank is not None:
            self._worker_offset = self.rank * self.cpu_page_size
            self._worker_area_end = self._worker_offset + self.cpu_page_size
            if self._worker_area_end > self._row_stride:
                raise InvalidArgument(
                    f"the cell of rank {self.rank} would end at byte {self._worker_area_end}, "
                    f"beyond its row of {self._row_stride} bytes"
                )
        if is_creators:
            return (whole, NOTHING), 1
        if shard is not None:
            index, count = (integer_from("populate_shard", number, 0) for number in shard)
            if index >= count:
                raise InvalidArgument(f"populate_shard {shard}: the index must be below {count}")
            pages = self.total_size_bytes // self.page_size
            begin, end = (min(pages, -(-pages // count) * n) for n in (index, index + 1))
            part = Part(begin * self.page_size, (end - begin) * self.page_size, 0, 1)
            return (part, part), count
        if self.rank is None:
            return (whole, whole), 1
        cells = Part(self._worker_offset, self.cpu_page_size, self._row_stride, self.num_chunks)
        return (cells, cells), self.num_workers

    @property
    def base_tensor(self) -> torch.Tensor:
        """The whole region as int8."""
        self._check()
        base: torch.Tensor = self._base
        return base

    create_next_worker_view = memlane.SharedOffloadRegion.create_next_view

    def create_next_canonical_view(self, tensor_page_size: int) -> torch.Tensor:
        """The next tensor that all ranks share, from the beginning of each row."""
        at, size = self._canonical_offset, integer("tensor_page_size", tensor_page_size)
        if size < 1 or at + size > self._row_stride:
            raise OutsideCell(f"{size} bytes at byte {at} exceed rows of {self._row_stride} bytes")
        view = self.base_tensor.as_strided((self.num_chunks, size), (self._row_stride, 1), at)
        self._canonical_offset += size
        self._views.append(view)
        return view

    def iter_worker_slot_ranges(self) -> Iterator[tuple[int, int]]:
        """Yields (offset, bytes) of this rank's cells, rounded out to whole pages."""
        if self.rank is None:
            raise OutsideCell("a region without a rank has no cells")
        page, begin = self.page_size, self.rank * self.cpu_page_size
        for row in range(0, self.total_size_bytes, self._row_stride):
            first = (row + begin) // page * page
            yield first, -(-(row + begin + self.cpu_page_size) // page) * page - first

    def create_kv_memoryview(self) -> memoryview:  # type: ignore[override]
        """The whole region without a copy; shape (num_chunks, kv_bytes_per_chunk)."""
        return memoryview(self.base_tensor.view(self.num_chunks, -1).numpy())

    def cleanup(self) -> None:
        """Unlocks the pages that vLLM has locked, then does as memlane's."""
        if self.is_pinned and self._base is not None and self._file.is_own:
            for address in reversed(self.pinned_addresses or [self._base.data_ptr()]):
                _host_unregister(address)
        self.pinned_addresses.clear()
        self.is_pinned = False
        self._base = None
        super().cleanup()
        self._end()


# What 0.24 to 0.29 call these arguments; 0.24 and 0.25 the first.
FORMER = {
    "instance_id": "engine_id",
    "num_blocks": "num_chunks",
    "kv_bytes_per_block": "kv_bytes_per_chunk",
}


class RegionOfBlocks(SharedOffloadRegion):
    """With the names of the constructor's arguments until 0.29."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **{FORMER.get(name, name): it for name, it in named.items()})


def _host_unregister(address: int) -> None:
    if hasattr(vllms_own, "host_unregister"):
        vllms_own.host_unregister(address)
    elif code := torch.cuda.cudart().cudaHostUnregister(address).value:  # until 0.31
        logger.warning("cudaHostUnregister of an offload region failed: %d", code)


def _join(barrier: Callable[[], object], rank: object, error: Exception) -> None:
    """The others wait at the barrier, even for a rank that has failed with `error`."""
    try:
        barrier()
    except Exception as failure:
        logger.warning(
            "rank %s of an offload region could not set it up (%r), and the barrier that releases "
            "the other ranks failed, too: %r; they may wait until the barrier's own timeout",
            *(rank, error, failure),
        )


def _leave(holding: Holding, folder: str) -> None:
    holding.end()
    _folder.remove(folder)


def replacements() -> list[Replacement]:
    """The replacements for this process."""
    own = vllms_own.SharedOffloadRegion
    has_blocks = "num_blocks" in signature(own).parameters
    ours = RegionOfBlocks if has_blocks else SharedOffloadRegion
    return [Replacement(vllms_own.__name__, own.__name__, ours)]
