"""Names of segments, and views of their memory, for all systems."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

NAME_PREFIX = "memlane-"


def new_id() -> bytes:
    """128 random bits. The segment's name contains them, so names never collide."""
    return os.urandom(16)


def name_of(segment_id: bytes) -> str:
    """The name of the segment in /dev/shm."""
    return NAME_PREFIX + segment_id.hex()


class SharedMemoryInfo(NamedTuple):
    """Has the attributes of `multiprocessing.shared_memory.SharedMemory`; the size is in bytes."""

    name: str
    size: int
    buf: memoryview


@contextmanager
def released_after(view: memoryview) -> Iterator[memoryview]:
    """Releases `view` after the block. Slices that outlive it keep the memory mapped."""
    try:
        yield view
    finally:
        with suppress(BufferError):
            view.release()
