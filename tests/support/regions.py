"""Offload regions for tests, in this process and in others."""

import ctypes
import errno
import itertools
import mmap
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from memlane import SharedOffloadRegion
from memlane._native import RegionFile
from tests.support import Link, Remote, serve, start
from tests.support.seccomp import ALLOW, AT_LEAST, EQUALS, FAIL, GIVE, LOAD, install

Region = SharedOffloadRegion
PAGE = mmap.PAGESIZE
_numbers = itertools.count()


def new_id() -> str:
    """An instance id that no one else uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def region_of(
    instance: str,
    rank: int | None = 0,
    *,
    blocks: int = 4,
    workers: int = 2,
    cell: int = PAGE,
    extra: int = 0,
    **options: Any,
) -> Region:
    """A region of `blocks` rows of `workers` cells, and `extra` bytes after them."""
    total = blocks * workers * cell + extra
    return Region(instance, total, blocks, rank, workers, cell, **options)


def path_of(instance: str) -> Path:
    return Path(f"/dev/shm/vllm_offload_{instance}.mmap")


@contextmanager
def mapped(path: str | Path) -> Iterator[mmap.mmap]:
    """The same file as mapped by a process that knows nothing about memlane."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def populated_pages(path: str | Path) -> list[bool]:
    """The pages of the file that have content; reserved pages alone do not."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mapped(path) as memory:
        count = -(-len(memory) // PAGE)
        found = (ctypes.c_ubyte * count)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(memory)), found) == 0
        return [bool(one & 1) for one in found]


def without_populate() -> None:
    """From here on, madvise behaves in this process as it does in a kernel before 5.14."""
    _without_advice(22)


def without_huge_pages() -> None:
    """The same, for a kernel before 6.1, which cannot collapse pages on demand."""
    _without_advice(25)


def _without_advice(first: int) -> None:
    number = {"x86_64": 28, "aarch64": 233}[platform.machine()]
    install(
        [
            (LOAD, 0, 0, 0),  # the call
            (EQUALS, 0, 4, number),
            (LOAD, 0, 0, 32),  # its third argument
            (AT_LEAST, 0, 2, first),
            (AT_LEAST, 1, 0, 26),
            (GIVE, 0, 0, FAIL | errno.EINVAL),
            (GIVE, 0, 0, ALLOW),
        ]
    )


def file_of(instance: str, *, blocks: int = 4, workers: int = 2, cell: int = PAGE) -> RegionFile:
    """The file alone, at any step of its start."""
    name = f"vllm_offload_{instance}.mmap"
    return RegionFile(b"/dev/shm", name, blocks * workers * cell, blocks, workers * cell, cell)


def serving(link: Link, instance: str, rank: int | None, options: dict[str, Any]) -> None:
    """Role: a region that makes the requested calls."""
    with region_of(instance, rank, **options) as region:
        serve(link, region, region._creator)


def start_region(
    instance: str, rank: int | None = 0, method: str = "fork", **options: Any
) -> Remote:
    """A started region in its own process; its greeting is whether it is the creator."""
    return Remote(start(serving, instance, rank, options, method=method))


def half_created(link: Link, instance: str) -> None:
    """Role: creates the file, and reserves nothing."""
    file = file_of(instance)
    assert file.enter(0.1) == "created"
    assert file.await_space(0) == "build"
    link.tell()
    link.hear()
    file.leave(1.0)
