"""One holder of a region, from start to end: its file, memory and page locks.

It does not depend on what a row contains.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from memlane._base.lifetime import Owned, undone_by
from memlane._locks import Lock
from memlane._native import RegionFile, RegionMap, usable_cores
from memlane.errors import InvalidArgument, InvalidType, WrongProcess
from memlane.offload import _start
from memlane.offload._page_locks import PageLocks

_MOST_BYTES = 1 << 58
_LEAVE_PATIENCE = 1.0
_MOST_THREADS = 16
_log = logging.getLogger("memlane.offload")


class Holding(Owned):
    """Starts when it is created; ends with `end`, or when its last reference is dropped."""

    def __init__(
        self, file_name: str, num_blocks: int, row_bytes: int, cell_bytes: int, plan: _start.Plan
    ) -> None:
        if plan.total_bytes >= _MOST_BYTES:
            raise InvalidArgument(f"{plan.total_bytes} bytes are too many for a region")
        directory = os.fsencode(plan.directory)
        sizes = (plan.total_bytes, num_blocks, row_bytes, cell_bytes)
        file = RegionFile(directory, file_name, *sizes, plan.label)
        self.file = file
        with undone_by(lambda: file.leave(_LEAVE_PATIENCE)):
            started = _start.start(file, plan)
            self.require_own()
        self.is_creator = started.is_creator
        self.pages = started.pages
        memory = file.region_map()
        self.memory: RegionMap | None = memory
        self.locks = PageLocks(file.address, plan.total_bytes, row_bytes, plan.shown)
        self._plan = plan
        self.is_open = True
        self._one_at_a_time = Lock()
        what = f"{plan.shown} ({plan.total_bytes} bytes)"
        self._own(partial(_release, file, self.locks, memory, what))
        _log.info(
            "%s %s (%d bytes, pages: %s)",
            "created" if self.is_creator else "joined",
            plan.shown,
            plan.total_bytes,
            self.pages,
        )

    def require_own(self) -> None:
        if not self.file.is_own:
            raise WrongProcess(
                "this region was opened in the parent process, before the fork; only cleanup() may "
                "be called here. Make a new region in the child"
            )

    def remove_name(self) -> None:
        """Call it once all have mapped the file: from then on nothing can be left behind."""
        _start.remove_name(self.file, self._plan)

    def end(self) -> None:
        """Frees everything; the last holder removes the file. Idempotent, and can be called again
        if a signal handler raised in it."""
        self.is_open, self.memory = False, None
        with self._one_at_a_time:
            self._abandon()


def _release(file: RegionFile, locks: PageLocks, memory: RegionMap, what: str) -> None:
    """Leaves the region; also as the finalizer. Releases page locks before the mapping."""
    if file.is_own:  # in a forked child CUDA cannot be used, and nothing is locked
        locks.unlock()
    locks.forget()
    memory.close()
    removed, problem = file.leave(_LEAVE_PATIENCE)
    if removed:
        _log.info("removed %s", what)
    if problem:
        _log.warning("%s may remain until the next start replaces it: %s", what, problem)


def share_of_cores(sharing: int) -> int:
    """Number of threads for one of `sharing` holders that start at once."""
    return max(1, min(_MOST_THREADS, usable_cores() // sharing))


def file_name(what: str, instance_id: object, prefix: object) -> str:
    """A file name of `prefix` and `instance_id`; errors call the id `what`."""
    for called, text in ((what, instance_id), ("prefix", prefix)):
        if not isinstance(text, str):
            raise InvalidType(f"{called} must be a string, not {type(text).__name__}")
        if "/" in text or "\0" in text or ".." in text:
            raise InvalidArgument(f"{called} {text!r} cannot be part of a file's name")
    if not instance_id:
        raise InvalidArgument(f"{what} must not be empty")
    name = f"{prefix}{instance_id}.mmap"
    try:
        length = len(name.encode())  # a surrogate, which stands for a byte that is not UTF-8, fails
    except UnicodeEncodeError:
        raise InvalidArgument(f"{name!r} ({what}) cannot be the name of a file") from None
    if length > 255:
        raise InvalidArgument(f"{name[:40]!r}... has {length} bytes; a file's name has at most 255")
    return name
