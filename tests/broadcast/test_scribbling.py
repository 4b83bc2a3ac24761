"""A peer scribbles into the segment: an error or the right bytes, never a crash.

Fails without the guard: lengths and offsets that are trusted, or read twice, lead out of the
mapping.
"""

import mmap
import os
import random
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from memlane import MessageQueue, OutOfMemory, ShmExhausted
from tests.support import Link, Peer, start
from tests.support.queues import path_of, queue_of

CHUNK, CHUNKS, READERS = 256, 2, 2
TRAILER = (CHUNK + 1 + READERS) * CHUNKS
ROUNDS = 20
VALUES = [0x00, 0x01, 0x7F, 0x80, 0xFF]
MESSAGE = [np.arange(16, dtype=np.uint8), {"k": (1, 2.5, None)}, b"bytes"]


@contextmanager
def scribble(queue: MessageQueue) -> Iterator[mmap.mmap]:
    """The whole segment, writable, as any process of the same user can map it."""
    descriptor = os.open(path_of(queue), os.O_RDWR)
    with mmap.mmap(descriptor, 0) as everything:
        os.close(descriptor)
        yield everything


def limit_memory() -> None:
    """Makes an unbounded allocation a MemoryError."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (now + (2 << 30), -1))


def read_one(reader: MessageQueue) -> object:
    """Reads a message, or None for an error, unless a huge allocation raised it."""
    try:
        return reader.dequeue(timeout=0)
    except ShmExhausted:
        return None
    except MemoryError:
        raise AssertionError("a length was believed") from None
    except Exception:
        return None


def use_everything(writer: MessageQueue, readers: list[MessageQueue]) -> None:
    """Makes every call once; errors are accepted, wrong answers are not."""
    for reader in readers:
        received = read_one(reader)
        assert received is None or repr(received) == repr(MESSAGE), received
        with suppress(Exception), reader.acquire_read(timeout=0) as chunk:
            bytes(chunk)
        with suppress(Exception):
            repr(reader.statistics())
    with suppress(Exception):
        writer.enqueue(MESSAGE, timeout=0)
    with suppress(Exception), writer.acquire_write(timeout=0) as chunk:
        chunk[:] = bytes(len(chunk))
    for call in (writer.statistics, lambda: writer.wait_until_ready(0)):
        with suppress(Exception):
            repr(call())


def damage_the_trailer(_link: Link, part: int, parts: int) -> int:
    limit_memory()
    dice = random.Random(part)
    tried = 0
    with queue_of(READERS, max_chunk_bytes=CHUNK, max_chunks=CHUNKS, ready=False) as (writer, _):
        size = path_of(writer).stat().st_size
    for offset in range(TRAILER + part, size, parts):
        with queue_of(READERS, max_chunk_bytes=CHUNK, max_chunks=CHUNKS, ready=False) as ends:
            writer, readers = ends
            writer.enqueue(MESSAGE)
            with scribble(writer) as everything:
                if everything[offset] == 0 and dice.random() < 0.7:
                    continue  # most of it is room for later: a sample will do
                everything[offset] = dice.choice(VALUES)
            tried += 1
            use_everything(writer, readers)
    return tried


@pytest.mark.parametrize("part", range(3))
def test_no_overwritten_byte_of_the_trailer_crashes(part: int) -> None:
    """Whatever byte behind the documented part is overwritten, no call crashes or hangs."""
    assert start(damage_the_trailer, part, 3).result() > 20


def damage_the_chunk(_link: Link) -> int:
    limit_memory()
    tried = 0
    for offset in range(CHUNK):
        for value in VALUES:
            with queue_of(1, max_chunk_bytes=CHUNK, max_chunks=CHUNKS, ready=False) as ends:
                writer, (reader,) = ends
                writer.enqueue(MESSAGE)
                writer.enqueue("next", timeout=0)
                with scribble(writer) as everything:
                    everything[offset] = value
                tried += 1
                try:
                    reader.dequeue(timeout=0)
                except OutOfMemory:
                    continue  # it claims more than there is, and is kept: there may be more later
                except Exception:
                    pass
                assert reader.dequeue(timeout=0) == "next"
    return tried


def test_an_overwritten_byte_of_a_message_costs_that_message_only() -> None:
    """Whatever byte of a chunk is overwritten, that message is consumed and the next one comes,
    unless it claims more memory than there is."""
    assert start(damage_the_chunk).result() == CHUNK * len(VALUES)


def scribble_all_the_time(link: Link, name: str) -> None:
    descriptor = os.open(name, os.O_RDWR)
    dice = random.Random(0)
    with mmap.mmap(descriptor, 0) as everything:
        link.tell()
        while True:
            everything[dice.randrange(TRAILER, len(everything))] = dice.choice(VALUES)


def use_meanwhile(link: Link) -> int:
    limit_memory()
    done = 0
    for _ in range(ROUNDS):
        with queue_of(READERS, max_chunk_bytes=CHUNK, max_chunks=CHUNKS, ready=False) as ends:
            writer, readers = ends
            link.tell(str(path_of(writer)))
            link.hear()
            for _ in range(50):
                use_everything(writer, readers)
                done += 1
    return done


def test_while_it_is_used() -> None:
    """A process that overwrites at any moment finds no window in which a call crashes."""
    victim = start(use_meanwhile)
    attackers: list[Peer] = []
    for _ in range(ROUNDS):
        name = victim.hear()
        for attacker in attackers:
            attacker.kill()  # its queue is gone, and it takes a core
        attackers = [start(scribble_all_the_time, name)]
        attackers[0].hear()
        victim.tell("go")
    assert victim.result() == 50 * ROUNDS
