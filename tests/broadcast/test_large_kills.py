"""Kill -9 and SIGSTOP while large messages, and views of them, are in flight.

Afterwards: what a survivor has read has no gap and no wrong byte, the space of extents is
given back, and nothing is left. Fails without the guard: an extent that is announced before it is
complete, or freed before everybody has read it.
"""

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from memlane import Closed, Handle, MessageQueue, ReaderDied, ViewInUse, WriterDied
from tests.support import PATIENCE, Aside, Link, Peer, assert_in_time, start
from tests.support.queues import BOUND, file_of, refuses, start_reader, sweep

KILLS = int(os.environ.get("MEMLANE_SOAK_KILLS", "100")) // 10
pytestmark = pytest.mark.soak(seconds=60 + 10 * KILLS)
KIB, MIB = 1 << 10, 1 << 20
CHUNK, CHUNKS, KEEP, LARGEST = 4 * KIB, 3, MIB, 2 * MIB
MOST = KEEP + (CHUNKS + 1) * (LARGEST + MIB // 2)
"""Bytes that the file may have at any moment: what is warm, and a message for each turn."""


Numbers = np.ndarray[tuple[int], np.dtype[np.int64]]


def message(number: int) -> Numbers:
    """From small messages to the largest; every byte follows from the number."""
    return np.full((100, 400, 50_000, LARGEST // 8)[number % 4], number)


def new_writer(n_readers: int) -> MessageQueue:
    return MessageQueue(n_readers, n_readers, None, CHUNK, CHUNKS, max_extent_bytes=KEEP)


def allocated(writer: MessageQueue) -> int:
    return file_of(writer).st_blocks * 512


def take_view(queue: MessageQueue, timeout: float) -> Numbers:
    """Takes the next message as a view that outlives its block."""
    block = queue.dequeue_view(timeout)
    array: Numbers = block.__enter__()
    with suppress(ViewInUse):
        block.__exit__(None, None, None)
    return array


def read_to_the_end(queue: MessageQueue, seed: float) -> tuple[int, Exception, float]:
    """Reads by copy and by view, keeping some views for a while; how many came, and the error."""
    dice = random.Random(seed)
    kept: list[Numbers] = []
    number = 0
    while True:
        try:
            if dice.random() < 0.5:
                array = queue.dequeue(PATIENCE)
            else:
                array = take_view(queue, PATIENCE)
                kept.append(array)
        except ViewInUse:  # the next chunk is one of the kept; nothing was consumed
            kept.clear()
            array = None
            continue
        except Exception as error:
            return number, error.with_traceback(None), time.monotonic()
        assert array.shape == message(number).shape
        assert (array == number).all(), f"not message {number}"
        array = None
        if len(kept) > 1:
            first = kept.pop(dice.randrange(2))
            assert (first == first[0]).all()
            del first
        number += 1


def write_to_the_end(queue: MessageQueue) -> tuple[int, Exception, float]:
    for number in itertools.count():
        try:
            queue.enqueue(message(number), PATIENCE)
        except Exception as error:
            return number, error.with_traceback(None), time.monotonic()
        if number % 8 == 0:
            assert allocated(queue) < MOST
    raise AssertionError


def writing(link: Link) -> None:
    queue = new_writer(2)
    link.tell(queue.export_handle())
    write_to_the_end(queue)


def reading(link: Link, handle: Handle, rank: int, seed: int) -> tuple[int, Exception, float]:
    queue = MessageQueue.create_from_handle(handle, rank)
    link.tell()
    end = read_to_the_end(queue, seed)
    queue.close()
    return end


def rounds() -> Iterator[random.Random]:
    for number in range(max(1, KILLS)):
        yield random.Random(number)


def kill_after(peer: Peer, delay: float) -> float:
    time.sleep(delay)
    return peer.kill()


def test_readers_of_a_killed_writer_get_a_gapless_prefix() -> None:
    """Both readers get a gapless prefix, every byte of it, then WriterDied."""
    for dice in rounds():
        writer = start(writing)
        handle = writer.hear()
        with MessageQueue.create_from_handle(handle, 0) as reader:
            other = start(reading, handle, 1, dice.random())
            other.hear()
            killing = Aside(kill_after, writer, dice.uniform(0, 0.1))
            ends = [read_to_the_end(reader, 1), other.result()]
            killed = killing.result()
        for _, error, moment in ends:
            assert isinstance(error, WriterDied), error
            assert_in_time(BOUND, killed, moment)
        sweep()  # it died before its queue was ready, and left its name


def test_a_killed_reader_costs_the_other_nothing() -> None:
    """The other reader misses nothing, and the file never has more space than its turns need."""
    for dice in rounds():
        with new_writer(2) as writer:
            doomed = start(reading, writer.export_handle(), 0, dice.random())
            other = start(reading, writer.export_handle(), 1, dice.random())
            doomed.hear()
            other.hear()
            writer.wait_until_ready(PATIENCE)
            killing = Aside(kill_after, doomed, dice.uniform(0, 0.1))
            sent, error, moment = write_to_the_end(writer)
            assert isinstance(error, ReaderDied), error
            assert_in_time(BOUND, killing.result(), moment)
            writer.release_reader(0)
            for _ in range(20):
                writer.enqueue(message(sent), PATIENCE)
                sent += 1
                assert allocated(writer) < MOST
        count, error, _ = other.result()
        assert isinstance(error, Closed), error
        assert count == sent


def hold_views(queue: MessageQueue, count: int) -> None:
    """Takes views of that many messages, and keeps them as long as the process lives."""
    queue.__dict__["kept"] = [take_view(queue, PATIENCE) for _ in range(count)]


def check_views(queue: MessageQueue) -> list[int]:
    kept = queue.__dict__.pop("kept")
    assert all((array == array[0]).all() for array in kept)
    return [int(array[0]) for array in kept]


def test_a_reader_that_is_killed_with_views() -> None:
    """Its views block the writer until it is released; then all their space is given back."""
    with new_writer(1) as writer:
        doomed = start_reader(writer.export_handle())
        for _ in range(CHUNKS):
            writer.enqueue(message(3), timeout=0)
        doomed.call(hold_views, CHUNKS)
        with refuses(TimeoutError, match="holds views of 3 chunks"):
            writer.enqueue("too early", timeout=0)
        blocked = Aside(writer.enqueue, message(3)).until_blocked()
        killed = doomed.peer.kill()
        with refuses(ReaderDied):
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        assert allocated(writer) >= CHUNKS * LARGEST
        writer.release_reader(0)
        writer.enqueue("next", timeout=0)
        assert allocated(writer) < KEEP + MIB


def test_a_reader_that_is_stopped_with_views() -> None:
    """Stopped is not dead: the writer is blocked, the file does not grow, the views stay."""
    with new_writer(1) as writer:
        reader = start_reader(writer.export_handle())
        for number in range(CHUNKS):
            writer.enqueue(message(4 * number + 3), timeout=0)
        reader.call(hold_views, CHUNKS)
        reader.peer.stop()
        for _ in range(20):
            with refuses(TimeoutError, match="stopped, holds views of 3 chunks"):
                writer.enqueue(message(3), timeout=0)
            assert allocated(writer) < MOST
        reader.peer.resume()
        assert reader.call(check_views) == [3, 7, 11]
        writer.enqueue("next", timeout=0)
        assert reader.call("dequeue") == "next"
        reader.call("close")


def test_a_writer_that_is_killed() -> None:
    """The views that a reader holds do not change."""
    writer = start(writing)
    handle = writer.hear()
    with MessageQueue.create_from_handle(handle, 0) as reader:
        kept = [take_view(reader, PATIENCE) for _ in range(CHUNKS)]
        writer.kill()
        for number, array in enumerate(kept):
            np.testing.assert_array_equal(array, message(number))
    sweep()
