"""SharedOffloadRegion: one mapping of KV-cache blocks for all workers of an instance."""

from __future__ import annotations

import logging
import mmap
import os
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from memlane._base.arguments import integer, integer_from
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.labels import checked_label, label_in
from memlane._base.lifetime import Owned
from memlane._base.naming import shown
from memlane._base.paths import path_from
from memlane._importing import fork_waits
from memlane._native import await_bytes
from memlane.errors import (
    Closed,
    InvalidArgument,
    InvalidType,
    OutsideCell,
    TimedOut,
    Unsupported,
)
from memlane.offload import _pages, _start
from memlane.offload._holding import Holding, file_name, share_of_cores
from memlane.offload.copy import MOST_THREADS

if TYPE_CHECKING:
    import torch

    from memlane._native import RegionMap, RegionRows

V = TypeVar("V")
_log = logging.getLogger("memlane.offload")

MOST_PARTICIPANTS = 1 << 16  # the number of holders for which the file has locks


class SharedOffloadRegion(Owned):
    """KV-cache blocks of all workers of an instance, in one shared file that each worker maps.

    To clean up on SIGTERM too, install the handler shown in `help(memlane)`.

    Args:
        instance_id: part of the file's name; the same in all processes of the instance.
        total_size_bytes: size of the file; at least num_blocks * num_workers * cpu_page_size.
        num_blocks: number of rows; a row contains one block of all workers.
        rank: this worker's rank; None, for a scheduler or a tier, maps everything without a cell.
        num_workers: number of cells in a row.
        cpu_page_size: bytes of a cell, which contains one block of all tensors of one worker.
        participants: number of these objects in all processes of the instance. Once that many have
            mapped the file, its name is removed, so that nothing is left behind however they end.
        directory, prefix: where the file is, and how its name begins.
        progress: called in this thread with (bytes populated, bytes to populate) as they grow.
        pages: "4k", "huge", or "auto": huge pages from 64 MiB on, as long as there are free ones
            and they cost no more than small ones.
        threads: how many reserve and populate, 1 to 256; default: this worker's share of the cores.
        timeout: seconds to wait for others, or None for no limit. Applies anew whenever the
            region's space has grown.
        name: what people call the region, in `memlane ls`, metrics, log lines and errors: up to 40
            of the ASCII letters, digits and . _ - [ ] /. The first holder's counts.

    Attributes:
        page_size: the system's, in bytes.
        total_size_bytes, num_blocks, rank, num_workers, cpu_page_size: as above.
        mmap_path: path of the file.
        name: what people call the region, or empty.
        pages: what the region is made of: "4k", "huge" or "mixed".
        fd, mmap_obj: descriptor, and mapping with the interface of `mmap.mmap`; None after
            `cleanup()`.

    Raises:
        InvalidArgument: a ValueError; sizes that do not fit, or an id that cannot be in a name.
        RankTaken: the region has no place for another holder.
        LayoutMismatch: a ValueError; the instance is alive, with another geometry.
        SegmentRefused: a PermissionError; the file of that name is not this user's, or is another
            implementation's region, in use.
        ShmExhausted: a MemoryError; the file system, the cgroup or the machine lacks the space.
        TimedOut: others are joining or reserving and do not finish.
        Unsupported: pages="huge", and the kernel gives none.

    Cell `w` of block `b` is at (b * num_workers + w) * cpu_page_size. The first process to start
    creates the file and reserves all its space; each populates the pages of its own cells. A file
    that nobody holds was left by a run that died, and is replaced.

    There is no `numa=`: the memory policy of the creator's process (start it with numactl) or of
    the file system (mount -o mpol=...) places the pages.

    Example::

        size = 1 << 16  # of one block of this worker
        with SharedOffloadRegion("example", 16 * size, 16, 0, 1, size, participants=1) as region:
            blocks = region.create_next_array(size)  # one row a block
            blocks[3] = 7
    """

    _instead_of_pickling = "make one in each process, with the same instance_id and sizes"

    def __init__(
        self,
        instance_id: str,
        total_size_bytes: int,
        num_blocks: int,
        rank: int | None,
        num_workers: int,
        cpu_page_size: int,
        *,
        participants: int | None = None,
        directory: str | bytes | os.PathLike[str] | os.PathLike[bytes] = "/dev/shm",
        prefix: str = "vllm_offload_",
        progress: _start.Progress | None = None,
        pages: _pages.Pages = "auto",
        threads: int | None = None,
        timeout: float | None = 30.0,
        name: str | None = None,
    ) -> None:
        self.page_size = mmap.PAGESIZE
        self.num_blocks = integer_from("num_blocks", num_blocks, 1)
        self.num_workers = integer_from("num_workers", num_workers, 1)
        self.cpu_page_size = integer_from("cpu_page_size", cpu_page_size, 1)
        self.total_size_bytes = integer_from("total_size_bytes", total_size_bytes, 1)
        self.rank = None if rank is None else integer_from("rank", rank, 0)
        self._row_stride = self.cpu_page_size * self.num_workers
        self._check_sizes()
        if participants is not None:
            participants = integer_from("participants", participants, 1, MOST_PARTICIPANTS)
        if progress is not None and not callable(progress):
            raise InvalidType("progress must be callable with two numbers")
        seconds_of(timeout)
        label = checked_label(name)
        file = file_name("instance_id", instance_id, prefix)
        where = _absolute(directory)
        self.mmap_path = f"{where}/{file}"
        part = _start.Part(0, self.total_size_bytes, 0, 1)
        sharing = 1
        if self.rank is not None:
            sharing = self.num_workers
            self._worker_offset = self.rank * self.cpu_page_size
            self._worker_area_end = self._worker_offset + self.cpu_page_size
            part = _start.Part(
                self._worker_offset, self.cpu_page_size, self._row_stride, self.num_blocks
            )
        plan = _start.Plan(
            directory=where,
            path=self.mmap_path,
            total_bytes=self.total_size_bytes,
            part=part,
            joiners_part=part,
            threads=share_of_cores(sharing)
            if threads is None
            else integer_from("threads", threads, 1, MOST_THREADS),
            pages=_pages.checked_pages(pages),
            participants=participants,
            progress=progress,
            timeout=timeout,
            label=label,
        )
        self._hold(Holding(file, self.num_blocks, self._row_stride, self.cpu_page_size, plan))
        if pages == "huge" and self.pages != "huge":
            what = (
                "%s is only partly in huge pages: memory is fragmented, or its creator wanted none"
            )
            _log.warning(what, plan.shown)

    def _hold(self, holding: Holding) -> None:
        self._holding = holding
        self._file = holding.file
        self._locks = holding.locks
        self.name = label_in(holding.file.label.encode())
        self._creator = holding.is_creator
        self.pages = holding.pages
        self.fd: int | None = holding.file.fd
        self.mmap_obj: RegionMap | None = holding.memory
        self._whole: torch.Tensor | None = None
        self._views: list[Any] = []

    def _check_sizes(self) -> None:
        if self.rank is not None and self.rank >= self.num_workers:
            raise InvalidArgument(f"rank {self.rank} is not below num_workers {self.num_workers}")
        if self.num_blocks * self._row_stride > self.total_size_bytes:
            raise InvalidArgument(
                f"{self.num_blocks} blocks of {self.num_workers} cells of {self.cpu_page_size} "
                f"bytes are {self.num_blocks * self._row_stride} bytes, more than "
                f"total_size_bytes {self.total_size_bytes}"
            )

    # Memory ---------------------------------------------------------------------------------

    @property
    def _base(self) -> torch.Tensor | None:
        """The whole region as an int8 tensor; None after `cleanup`."""
        if self._whole is None and self._is_open:
            torch = _torch("_base")
            self._whole = torch.frombuffer(self._file.memory(), dtype=torch.int8)
        return self._whole

    def create_next_view(self, tensor_page_size: int) -> torch.Tensor:
        """This worker's next tensor: int8, shape (num_blocks, tensor_page_size), in shared memory.

        Its stride is (num_workers * cpu_page_size, 1). Call it once for each of the worker's
        tensors; each view begins where the previous one ended in the cell. `tensor_page_size` is
        the number of bytes of one block of this tensor.

        Raises:
            OutsideCell: a ValueError and an AssertionError; the view would exceed the worker's
                cell, or there is no rank. Nothing has changed.
        """
        as_strided = _torch("create_next_view").as_strided
        size = self._checked_next(tensor_page_size)
        view: torch.Tensor = as_strided(
            self._base,
            (self.num_blocks, size),
            (self._row_stride, 1),
            self._worker_offset,
        )
        return self._advanced(view, size)

    def create_next_array(self, tensor_page_size: int) -> np.ndarray[Any, np.dtype[np.int8]]:
        """Like `create_next_view`, but returns a numpy array and does not need torch.

        `tensor_page_size` is in bytes. Raises as `create_next_view`.
        """
        size = self._checked_next(tensor_page_size)
        array: np.ndarray[Any, np.dtype[np.int8]] = np.ndarray(
            (self.num_blocks, size),
            np.int8,
            self._file.memory(),
            self._worker_offset,
            (self._row_stride, 1),
        )
        return self._advanced(array, size)

    def _checked_next(self, tensor_page_size: int) -> int:
        self._check()
        size = integer("tensor_page_size", tensor_page_size)
        if self.rank is None:
            raise OutsideCell("a region without a rank has no cell to make views of")
        if size < 1:
            raise OutsideCell(f"tensor_page_size must be at least 1, not {size}")
        end = self._worker_offset + size
        if end > self._worker_area_end:
            raise OutsideCell(
                f"Worker offset {end} exceeds worker area end {self._worker_area_end} (overflowed "
                f"by {end - self._worker_area_end} bytes): the tensors of one block must fit a "
                f"cell of {self.cpu_page_size} bytes"
            )
        return size

    def _advanced(self, view: V, size: int) -> V:
        self._worker_offset += size
        self._views.append(view)
        return view

    def create_kv_memoryview(self) -> RegionRows:
        """All blocks without a copy: `view[b]` is a writable memoryview of the row of block `b`.

        `len(view)` is num_blocks; `memoryview(view)` has shape (num_blocks, bytes of a row).

        Raises:
            Closed: the region was cleaned up.
        """
        self._check()
        return self._file.rows()

    @property
    def _is_open(self) -> bool:
        return self._holding.is_open

    def _check(self) -> None:
        if not self._is_open:
            raise Closed(f"the region {shown(self.mmap_path)} was cleaned up")
        self._holding.require_own()

    # Page-locking ---------------------------------------------------------------------------

    @property
    def is_pinned(self) -> bool:
        """True if the region is page-locked. Set it if you register `_base.data_ptr()` yourself."""
        return self._locks.is_locked

    @is_pinned.setter
    def is_pinned(self, value: bool) -> None:
        if value and not self._locks.is_locked:
            self._locks.take_over()
        elif not value:
            self._locks.forget()

    def pin(self) -> bool:
        """Page-locks the whole region for the GPU; logs a warning and returns False if it cannot.

        Raises:
            InvalidArgument: cells are not whole pages.
            Closed: the region was cleaned up.
        """
        self._check()
        if self.cpu_page_size % self.page_size:
            raise InvalidArgument(
                f"cells of {self.cpu_page_size} bytes are not whole pages of {self.page_size} "
                f"bytes, and only whole pages can be locked"
            )
        return self._locks.lock()

    def unpin(self) -> None:
        """Undoes `pin()`. Waits for GPU copies that `copy_blocks` has queued.

        Raises:
            Closed: the region was cleaned up.
        """
        self._check()
        self._locks.unlock()

    # End ------------------------------------------------------------------------------------

    def cleanup(self) -> None:
        """Frees everything; the last holder removes the file. Idempotent.

        Live views keep the memory mapped, but do not keep the region alive.
        """
        self._views.clear()
        self._whole = None
        self.mmap_obj = None
        self.fd = None
        self._creator = False
        self._holding.end()

    def _end_block(self, _has_failed: bool) -> None:
        self.cleanup()

    def __repr__(self) -> str:
        who = "whole" if self.rank is None else f"rank {self.rank} of {self.num_workers}"
        state = "" if self._is_open else " cleaned up"
        return (
            f"<SharedOffloadRegion {shown(self.mmap_path)} {who}{state}, {self.num_blocks} blocks, "
            f"{self.total_size_bytes} bytes>"
        )


def _absolute(directory: object) -> str:
    """The absolute path, because the working directory may change before the name is removed."""
    return os.path.abspath(path_from("directory", directory))


def _torch(what: str) -> Any:
    try:
        with fork_waits:
            import torch
    except ImportError as error:
        raise Unsupported(
            f"{what} needs torch, which cannot be imported here ({error}); create_next_array "
            f"gives numpy arrays"
        ) from None
    return torch


def _wait_for_file_size(fd: int, expected_size: int, timeout: float | None = 30.0) -> None:
    """Returns once the file has at least that many bytes; TimedOut after `timeout` seconds.

    For code that imports vLLM's function of this name; memlane does not use it.
    """
    deadline = Deadline(timeout)
    while not await_bytes(fd, expected_size, deadline.left(1.0)):
        if deadline.has_passed():
            raise TimedOut(
                f"the file has {os.fstat(fd).st_size} bytes after {timeout} s, not {expected_size}",
                timeout,
            )
