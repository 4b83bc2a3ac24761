"""SE: the writer reuses space while readers read: right bytes or an error, never a mixture.

Fails without the guard: a writer that does not check for pins overwrites what is being decoded.
"""

import itertools
import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from memlane import MemlaneError, ObjectGone, ShmObjectStorageHandle
from tests.support import Link, start, until
from tests.support.queues import refuses
from tests.support.stores import (
    BytesSerde,
    Paced,
    Place,
    Ring,
    Storage,
    fill,
    start_store_reader,
    store_of,
)

ONE = bytes(52)


def paced(link: Link, handle: ShmObjectStorageHandle, address: int, number: int) -> Any:
    reader = Storage.create_from_handle(handle)
    Paced.link = link
    link.tell("attached")
    link.hear()
    try:
        return reader.get(address, number)
    except ObjectGone:
        return "gone"
    finally:
        reader.close()


def test_se_reuse_in_the_middle_of_decoding_moves_no_other_counter() -> None:
    """A reads twice, B is halfway: B's object stays, and no counter of another moves."""
    with store_of(2, size=640, max_object_size=64, attached=1, serde=Paced) as (writer, (one,)):
        value = bytes(range(52))
        place = writer.put("k", value)
        slow = start(paced, writer.handle(), *place)
        assert slow.hear() == "attached"
        slow.tell()
        assert slow.hear() == "halfway"
        one.get(*place)
        one.get(*place)
        others = fill(writer, ONE, "other ")
        assert writer.is_cached("k")
        for other in others:
            one.get(*other)
        assert [reader.outstanding for reader in writer.statistics().readers] == [0, 10]
        with refuses(MemoryError):
            writer.put("new", ONE)
        slow.tell()
        assert slow.result() == value
        assert [reader.outstanding for reader in writer.statistics().readers] == [0, 0]
        for other in others:
            with writer.ring_buffer.access_buf(other[0]) as (data, _):
                assert writer.ring_buffer.byte2int(data[:4]) == 1
        writer.put("new", ONE)


def test_se_clear_does_not_wait_for_decoding() -> None:
    """clear() does not wait: B gets its object, whose bytes were not touched meanwhile."""
    with store_of(2, size=640, max_object_size=64, attached=0, serde=Paced) as (writer, _):
        value = bytes(range(52))
        place = writer.put("k", value)
        slow = start(paced, writer.handle(), *place)
        assert slow.hear() == "attached"
        slow.tell()
        assert slow.hear() == "halfway"
        writer.clear()
        others = fill(writer, ONE)
        assert [address for address, _ in others] == [64 * n for n in range(1, 10)]
        slow.tell()
        assert slow.result() == value


class Generous(Storage):
    """Evicts whatever nobody is reading, whether it was read or not."""

    def default_is_free_check(self, id: int, buf: memoryview) -> bool:
        return True


WORDS = 512
# Of the board, on which the writer says what is newest, and the readers what they have seen.
ADDRESS, NUMBER, OVER, RIGHT, GONE, FIELDS = 0, 1, 2, 3, 5, 7


def read_whatever_is_there(
    link: Link, handle: ShmObjectStorageHandle, board: "memoryview[int]", rank: int
) -> int:
    """Role: counts gets and views of what the writer said last; returns how many were wrong."""
    wrong = 0
    reader = Storage.create_from_handle(handle)
    link.tell()
    for turn in itertools.count():
        if board[OVER]:
            break
        address, number = board[ADDRESS], board[NUMBER]
        try:
            if turn % 2:
                words = np.frombuffer(reader.get(address, number), np.uint64)
                ok = bool((words == number).all())
            else:
                with reader.view(address, number) as view:
                    words = np.frombuffer(view, np.uint64)
                    ok = bool((words == number).all()) and bool((words == words[0]).all())
                    del words, view
        except ObjectGone:
            board[GONE + rank] += 1
            continue
        board[RIGHT + rank] += ok
        wrong += not ok
    reader.close()
    return wrong


def test_se_readers_race_with_eviction() -> None:
    """Two processes read at random while the writer evicts under them: not one wrong byte."""
    board = memoryview(mmap.mmap(-1, 8 * FIELDS)).cast("q")  # forked children share it
    # Two objects fit, so that what is newest is evicted at once.
    size = 2 * (8 * WORDS + 64) + 64
    with Generous(8 * WORDS + 4, 2, Ring(size, create=True), BytesSerde) as writer:
        board[ADDRESS], board[NUMBER] = writer.put("first", bytes(8 * WORDS))
        peers = [
            start(read_whatever_is_there, writer.handle(), board, rank, method="fork")
            for rank in range(2)
        ]
        for peer in peers:
            peer.hear()

        def has_happened() -> bool:
            """Reads came through, and were refused, and kept the writer out."""
            return sum(board[RIGHT:GONE]) > 100 and sum(board[GONE:]) > 0 and refused > 0

        number, refused = 1, 0
        until_when = time.monotonic() + 2.0
        while number <= 100 or not has_happened() or time.monotonic() < until_when:
            assert not any(peer.has_spoken() for peer in peers)
            value = np.full(WORDS, number, np.uint64).tobytes()
            try:
                place = writer.put(number, value)
            except MemoryError:
                refused += 1
                continue
            assert place[1] == number
            board[ADDRESS], board[NUMBER] = place
            number += 1
        board[OVER] = 1
        assert [peer.result() for peer in peers] == [0, 0]


def test_a_reader_that_scribbles_crashes_nobody() -> None:
    """Bytes that a reader writes over the ring are an error or themselves for others, never a
    crash."""
    with store_of(2, serde=BytesSerde) as (writer, (one, two)):
        place = writer.put("k", ONE)
        with one.ring_buffer.access_buf(place[0]) as (data, _):
            whole = one.ring_buffer.shared_memory.buf
            for size in (0, 8, -1, 2**31 - 1, 20):
                whole[4:8] = one.ring_buffer.int2byte(size)
                with refuses(ValueError):
                    two.get(*place)
            whole[4:8] = one.ring_buffer.int2byte(64)
            whole[0:4] = one.ring_buffer.int2byte(7)
            with refuses(ValueError):
                two.get(*place)
            whole[0:4] = one.ring_buffer.int2byte(0)
            data[4:] = bytes([255]) * len(data[4:])
            assert two.get(*place) == bytes([255]) * 52
        del whole


# Where things lie in the file of a ring of 4096 bytes with a storage for two readers.
HEADER, FACTS, TABLE = 4096, 8192, 8192 + 128 + 3 * 128


@contextmanager
def scribbled(at: int, words: list[int]) -> Iterator[tuple[Storage, Storage, Place]]:
    """A storage, a reader, the place of its only object; then somebody writes into its file."""
    with store_of(2, size=4096, max_objects=4, attached=1) as (writer, (reader,)):
        place = writer.put("k", ONE)
        with open(f"/dev/shm/{writer.ring_buffer.handle()[1]}", "r+b") as file:
            file.seek(at)
            file.write(struct.pack(f"<{len(words)}Q", *words))
        yield writer, reader, place


@pytest.mark.parametrize("size", [0, 3, 57, 4089, 4096, 2**31, 2**32 + 56, 2**63, 2**64 - 1])
def test_an_entry_that_lies(size: int) -> None:
    """A live entry of the right id and address, with any size: nothing beyond is touched."""
    with scribbled(TABLE + 16, [size]) as (writer, reader, place):
        for end in (reader, writer):
            with refuses(ValueError):
                end.get(*place)


@pytest.mark.parametrize("word", [0, 1, 2**32, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize(
    "at", [*range(FACTS, FACTS + 24, 8), *range(HEADER + 256, HEADER + 352, 8)]
)
def test_facts_and_directory_that_lie(at: int, word: int) -> None:
    """A process that attaches is refused, or finds what it needs; attached readers go on."""
    with scribbled(at, [word]) as (writer, reader, place):
        assert reader.get(*place) == ONE
        peer = start(attach_and_get, writer.handle(), place)
        assert peer.result() in ("refused", ONE)


def attach_and_get(_link: Link, handle: ShmObjectStorageHandle, place: Place) -> object:
    try:
        with Storage.create_from_handle(handle) as reader:
            return reader.get(*place)
    except MemlaneError:
        return "refused"


def test_every_object_reaches_every_process(method: str) -> None:
    """Every object reaches every process, while the ring goes round many times."""
    with store_of(2, size=1 << 14, max_object_size=1 << 12, attached=0) as (writer, _):
        remotes = [start_store_reader(writer, method) for _ in range(2)]
        for n in range(100):
            value = bytes([n % 256]) * (37 * n % 4000)
            place = writer.put(n, value)
            for remote in remotes:
                assert remote.call("get", *place) == value
        until(lambda: writer.statistics().evictions > 50)
        for remote in remotes:
            remote.leave()
