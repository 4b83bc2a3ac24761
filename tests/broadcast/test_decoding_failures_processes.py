"""A reader that lacks memory for a message keeps its queue."""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import OutOfMemory
from tests.support import Link, is_sanitized, start
from tests.support.queues import queue_of, refuses

LARGE: dict[str, Callable[[], Any]] = {
    "text": lambda: "x" * (20 << 20),
    "strings": lambda: [f"text {n}" * 9 for n in range(300_000)],
    "bytes": lambda: bytes(20 << 20),
    "array": lambda: np.ones(20 << 20, np.uint8),
}


def short_of_memory(_link: Link, kind: str) -> None:
    """Role: a reader whose address space is limited while a message comes."""
    with queue_of(max_chunk_bytes=4096) as (writer, (reader,)):
        message = LARGE[kind]()
        writer.enqueue(message)
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        least = pages * resource.getpagesize() + (8 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (least, hard))
        for _ in range(2):
            with refuses(MemoryError, match="not consumed") as caught:
                reader.dequeue(timeout=0, lend=False)
            assert type(caught.value) is OutOfMemory
            del caught
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert np.array_equal(reader.dequeue(timeout=0), message)


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer takes all of the address space")
@pytest.mark.parametrize("kind", LARGE)
def test_memory_that_runs_out(kind: str) -> None:
    """Long text, many strings, bytes and arrays alike: nothing is lost."""
    start(short_of_memory, kind, method="spawn").result()
