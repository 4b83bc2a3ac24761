"""Many puts of 100 kB through a ring of 64 MiB, each read by four processes.

``MEMLANE_SOAK_PUTS`` is the number of puts (default 2,000). As in an engine, the writer sends the
addresses through a queue, and a reader that is far behind blocks it. Every value is checked, no put
raises, and late in the run no process uses more memory than early on.
"""

import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import Handle, MessageQueue, ShmObjectStorageHandle
from memlane.store.serde import MsgpackSerde
from tests.support import PATIENCE, Link, is_sanitized, start
from tests.support.stores import Ring, Storage

PUTS = int(os.environ.get("MEMLANE_SOAK_PUTS", "2000"))
READERS = 4
RING = 64 << 20
WORDS = 100_000 // 8
BATCH = 16  # puts that one message tells of
# In the ring: what the queue holds, what each reader has at hand, what the writer is about to tell.
CHUNKS = 8
assert (CHUNKS + 3) * BATCH * (8 * WORDS + 4096) < RING
# Of the run; by then everybody has used all of the ring, and the pools are filled.
EARLY = 0.4
GROWTH = 2 << 20

pytestmark = pytest.mark.soak(seconds=60 + PUTS // 50)


def resident() -> int:
    """Private memory of this process, without the ring, of which it maps more as it uses it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) << 10
    raise AssertionError("no RssAnon")


def value_of(number: int) -> Any:
    return np.full(WORDS, number, np.int64)


def reading(link: Link, store: ShmObjectStorageHandle, handle: Handle, rank: int) -> list[int]:
    """Reads by copy and by view in turn, and records its memory at each message."""
    memory = []
    with (
        Storage.create_from_handle(store) as storage,
        MessageQueue.create_from_handle(handle, rank) as queue,
    ):
        link.tell()
        numbers = itertools.count()
        for places in queue:
            for place in places:
                number = next(numbers)
                expected = value_of(number)
                if (number + rank) % 2:
                    assert np.array_equal(storage.get(*place), expected), number
                else:
                    with storage.view(*place) as value:
                        assert np.array_equal(value, expected), number
                    del value
            memory.append(resident())
    assert next(numbers) == PUTS
    return memory


def has_grown(memory: list[int]) -> bool:
    """Late, and to stay: the least of the last fifth against the most of the fifth at EARLY."""
    fifth = max(1, len(memory) // 5)
    start_at = int(len(memory) * EARLY)
    return min(memory[-fifth:]) > max(memory[start_at : start_at + fifth]) + GROWTH


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer keeps what is freed")
def test_puts_never_fail_or_grow() -> None:
    """No MemoryError, no growth, no wrong value."""
    ring = Ring(RING, create=True)
    with (
        Storage(1 << 17, READERS, ring, MsgpackSerde) as storage,
        MessageQueue(READERS, READERS, max_chunk_bytes=4096, max_chunks=CHUNKS) as queue,
    ):
        readers = [
            start(reading, storage.handle(), queue.export_handle(), rank) for rank in range(READERS)
        ]
        for reader in readers:
            reader.hear()
        queue.wait_until_ready(PATIENCE)
        memory = []
        for first in range(0, PUTS, BATCH):
            numbers = range(first, min(first + BATCH, PUTS))
            places = [storage.put(number, value_of(number)) for number in numbers]
            queue.enqueue(places, PATIENCE)
            memory.append(resident())
        queue.close()
        series = [memory, *(reader.result() for reader in readers)]
        assert [has_grown(one) for one in series] == [False] * len(series), [
            one[:: max(1, len(one) // 20)] for one in series
        ]
        seen = storage.statistics()
        assert seen.puts == PUTS
        assert [one.reads for one in seen.readers] == [PUTS] * READERS
