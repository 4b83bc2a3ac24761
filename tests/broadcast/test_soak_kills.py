"""Kill -9 of every role at random moments, many times over.

``MEMLANE_SOAK_KILLS`` is the number of kills (default 100). After each one: the survivors raise
the right error within 1 s, what a survivor has read has no gap, and nothing is left in /dev/shm,
in the descriptors or among the threads of this process.
"""

import os
import random
import time
from collections.abc import Callable, Iterator

import pytest

from memlane import Closed, Handle, MessageQueue, ReaderDied, ShmRingBuffer, WriterDied
from tests.support import PATIENCE, Aside, Link, Peer, assert_in_time, start
from tests.support.queues import BOUND, drain, refuses
from tests.support.traffic import (
    leaving_nothing,
    message,
    read_to_the_end,
    reading,
    write_to_the_end,
)

KILLS = int(os.environ.get("MEMLANE_SOAK_KILLS", "100"))
pytestmark = pytest.mark.soak(seconds=60 + KILLS)


def rounds(tenths: int) -> Iterator[random.Random]:
    """``tenths`` tenths of all kills, each with its own random numbers."""
    for number in range(max(1, KILLS * tenths // 10)):
        yield random.Random(number * 10 + tenths)


def writing(link: Link, ready: bool) -> None:
    queue = MessageQueue(2, 2, None, 256, 3)
    link.tell(queue.export_handle())
    if ready:
        queue.wait_until_ready(PATIENCE)
    write_to_the_end(queue)


def kill_after(peer: Peer, delay: float) -> float:
    """Kills at a random moment; returns the time just before."""
    until = time.perf_counter() + delay
    while time.perf_counter() < until:
        time.sleep(0)
    return peer.kill()


def test_readers_of_killed_writers_get_a_gapless_prefix() -> None:
    """Both readers get a gapless prefix, then WriterDied with that pid."""
    for dice in rounds(3):
        with leaving_nothing():
            writer = start(writing, dice.random() < 0.5)
            handle = writer.hear()
            with MessageQueue.create_from_handle(handle, 0) as reader:
                other = start(reading, handle, 1)
                other.hear()
                killing = Aside(kill_after, writer, dice.uniform(0, 0.02))
                ends = [read_to_the_end(reader), other.result()]
                killed = killing.result()
            for _, error, moment in ends:
                assert isinstance(error, WriterDied), error
                assert error.pid == writer.pid
                assert_in_time(BOUND, killed, moment)


def test_killed_readers_cost_the_others_nothing() -> None:
    """The writer raises ReaderDied; after the release the other reader has missed nothing."""
    for dice in rounds(3):
        with leaving_nothing():
            with MessageQueue(2, 2, None, 256, 3) as writer:
                doomed = start(reading, writer.export_handle(), 0)
                other = start(reading, writer.export_handle(), 1)
                doomed.hear()
                other.hear()
                if dice.random() < 0.5:
                    writer.wait_until_ready(PATIENCE)
                killing = Aside(kill_after, doomed, dice.uniform(0, 0.02))
                sent, error, moment = write_to_the_end(writer)
                assert isinstance(error, ReaderDied), error
                assert (error.rank, error.pid) == (0, doomed.pid)
                assert_in_time(BOUND, killing.result(), moment)
                writer.release_reader(0)
                for _ in range(20):
                    writer.enqueue(message(sent), PATIENCE)
                    sent += 1
            count, error, _ = other.result()
            assert isinstance(error, Closed), error
            assert count == sent


def coming_and_going(link: Link, handle: Handle) -> None:
    link.tell()
    queue = MessageQueue.create_from_handle(handle, 0)
    queue.dequeue(timeout=PATIENCE)
    queue.close()


def test_readers_that_come_and_go() -> None:
    """A reader that dies while it attaches or closes is absent, dead or closed, nothing else."""
    for dice in rounds(2):
        with leaving_nothing(), MessageQueue(1, 1, None, 256, 3) as writer:
            writer.enqueue(message(0))
            doomed = start(coming_and_going, writer.export_handle())
            doomed.hear()
            kill_after(doomed, dice.uniform(0, 0.0006))
            state = writer.statistics().readers[0].state
            match state:
                case "absent":
                    with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
                        assert drain(reader) == [message(0)]
                        writer.enqueue(message(1), timeout=0)
                        assert drain(reader) == [message(1)]
                case "dead":
                    _, error, _ = write_to_the_end(writer, 1)
                    assert isinstance(error, ReaderDied), error
                    assert (error.rank, error.pid) == (0, doomed.pid)
                    with refuses(ReaderDied):
                        writer.enqueue(message(1), timeout=0)
                    writer.release_reader(0)
                case "closed":
                    pass
                case _:
                    raise AssertionError(state)
            for number in range(10):  # nobody is left, so nobody is waited for
                if state != "absent":
                    writer.enqueue(message(number), timeout=0)


def make_queues(link: Link) -> None:
    link.tell()
    while True:
        with MessageQueue(2, 2, None, 256, 3) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            writer.enqueue(1)
            reader.dequeue()
            reader.close()


def make_rings(link: Link) -> None:
    link.tell()
    while True:
        with ShmRingBuffer(2, 256, 3) as ring:
            ShmRingBuffer(*ring.handle()).close()


@pytest.mark.parametrize("make", [make_queues, make_rings])
def test_a_half_made_segment_of_a_killed_creator_is_swept(make: Callable[[Link], None]) -> None:
    """A half-created segment is gone after the next creation."""
    for dice in rounds(1):
        with leaving_nothing():
            creator = start(make)
            creator.hear()
            kill_after(creator, dice.uniform(0, 0.003))
