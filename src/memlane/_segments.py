"""What segments of all systems have in common for Python: names, and how they are looked at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

NAME_PREFIX = "memlane-"


def new_id() -> bytes:
    """128 random bits; they are also in the name, so that names never collide."""
    return os.urandom(16)


def name_of(segment_id: bytes) -> str:
    """The name of the segment in /dev/shm."""
    return NAME_PREFIX + segment_id.hex()


class SharedMemoryInfo(NamedTuple):
    """What `multiprocessing.shared_memory.SharedMemory` would tell of the segment."""

    name: str
    size: int
    buf: memoryview


@contextmanager
def released_after(view: memoryview) -> Iterator[memoryview]:
    """A slice that outlives the block keeps the memory mapped, so it may."""
    try:
        yield view
    finally:
        with suppress(BufferError):
            view.release()
