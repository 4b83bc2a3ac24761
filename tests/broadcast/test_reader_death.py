"""M6: a reader dies; the writer raises ReaderDied(rank, pid) within 1 s, the others continue.

Fails without the guard: a writer that only waits for flags would wait for a dead reader for ever.
"""

import signal
import time
from collections.abc import Callable

import pytest

from memlane import MessageQueue, ReaderDied
from tests.support import PATIENCE, Aside, assert_in_time
from tests.support.queues import BOUND, drain, fill, refuses, start_reader, start_writer

CALLS: dict[str, Callable[[MessageQueue], object]] = {
    "enqueue": lambda writer: writer.enqueue("never"),
    "enqueue with a timeout": lambda writer: writer.enqueue("never", timeout=PATIENCE),
    "acquire_write": lambda writer: writer.acquire_write().__enter__(),
    "broadcast_object": lambda writer: writer.broadcast_object("never"),
}


def hold_a_chunk(queue: MessageQueue) -> None:
    with queue.acquire_read():
        signal.pause()


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_writer_that_is_blocked_on_a_full_ring_learns_of_a_death(
    method: str, call: Callable[[MessageQueue], object]
) -> None:
    """The blocked call raises with rank and pid, has sent nothing, and so does every later one."""
    with MessageQueue(2, 2, [17, 4], 256, 3) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(17), 17)
        doomed = start_reader(writer.export_handle(4), 4, method)
        fill(writer)
        assert drain(reader) == [0, 1, 2]
        blocked = Aside(call, writer).until_blocked()
        killed = doomed.peer.kill()
        with refuses(RuntimeError) as caught:
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        error = caught.value
        assert isinstance(error, ReaderDied)
        assert (error.rank, error.pid) == (4, doomed.pid)
        assert "4" in str(error)
        assert str(doomed.pid) in str(error)
        for again in CALLS.values():
            with refuses(ReaderDied):
                again(writer)
        assert drain(reader) == []
        reader.close()


@pytest.mark.parametrize("when", ["holding a chunk", "between messages", "having read nothing"])
def test_wherever_the_reader_was(when: str) -> None:
    """A reader may die while it holds a chunk, which is free after the release."""
    with MessageQueue(1, 1, None, 256, 2) as writer:
        doomed = start_reader(writer.export_handle())
        fill(writer)
        if when == "between messages":
            doomed.call("dequeue")
            writer.enqueue("more", timeout=0)
        elif when == "holding a chunk":
            doomed.begin(hold_a_chunk).until_blocked()
        blocked = Aside(writer.enqueue, "never").until_blocked()
        killed = doomed.peer.kill()
        with refuses(ReaderDied):
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        writer.release_reader(0)
        for number in range(10):
            writer.enqueue(number, timeout=0)


def test_a_writer_that_never_blocks_learns_of_a_death() -> None:
    """The first call that begins later than 1 s after the death raises at the latest."""
    with MessageQueue(2, 2, None, 64, 64) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        doomed = start_reader(writer.export_handle(1), 1)
        writer.enqueue(0)
        doomed.call("dequeue")
        drain(reader)
        killed = doomed.peer.kill()
        sent = 0
        while True:
            begun = time.monotonic()
            try:
                # One message every 20 ms: a second of them fits the ring.
                writer.enqueue(sent, timeout=0)
            except ReaderDied as error:
                died = error
                break
            assert_in_time(BOUND, killed, begun)
            sent += 1
            with refuses(TimeoutError):
                assert drain(reader) == [sent - 1]
                reader.dequeue(timeout=0.02)
        assert (died.rank, died.pid) == (1, doomed.pid)
        reader.close()


def test_a_death_found_while_waiting_for_readiness_is_raised_again() -> None:
    """The death that wait_until_ready raised is raised by the very next enqueue, too.

    Fails without the guard: a writer with room in the ring looks every 250 ms only.
    """
    with MessageQueue(2, 2, None, 256, 3) as writer:
        doomed = start_reader(writer.export_handle(), 0)
        waits = Aside(writer.wait_until_ready, PATIENCE).until_blocked()
        doomed.peer.kill()
        with refuses(ReaderDied):
            waits.result()
        with refuses(ReaderDied) as caught:
            writer.enqueue("never", timeout=0)
        assert (caught.value.rank, caught.value.pid) == (0, doomed.pid)


def test_an_idle_writer_learns_of_a_death_in_its_next_call() -> None:
    """A writer that was away while a reader died learns of it in its first call after 1 s."""
    with MessageQueue(1, 1, None, 64, 64) as writer:
        doomed = start_reader(writer.export_handle())
        writer.enqueue(0)
        killed = doomed.peer.kill()
        time.sleep(max(0.0, killed + BOUND - time.monotonic()))  # the promised bound itself
        with refuses(ReaderDied):
            writer.enqueue(1, timeout=0)


def test_the_other_readers_go_on() -> None:
    """Waiting readers are not disturbed, and get the messages sent after the release."""
    with MessageQueue(3, 3, None, 256, 4) as writer:
        others = [start_reader(writer.export_handle(rank), rank) for rank in (0, 2)]
        doomed = start_reader(writer.export_handle(1), 1)
        writer.wait_until_ready(PATIENCE)
        for other in others:
            other.begin("dequeue").until_blocked()
        doomed.peer.kill()
        sent = 0
        while True:
            try:
                writer.enqueue(sent, timeout=PATIENCE)
            except ReaderDied:
                break
            sent += 1
        writer.release_reader(1)
        writer.enqueue(sent)
        for other in others:
            assert other.outcome() == 0
            assert [other.call("dequeue") for _ in range(sent)] == list(range(1, sent + 1))
            other.call("close")


def test_two_readers_that_die_at_once_are_both_named() -> None:
    """Both dead readers are named, one after the other."""
    with MessageQueue(2, 2, None, 256, 2) as writer:
        doomed = [start_reader(writer.export_handle(rank), rank) for rank in range(2)]
        fill(writer)
        blocked = Aside(writer.enqueue, "never").until_blocked()
        killed = min(remote.peer.kill() for remote in doomed)
        with refuses(ReaderDied) as caught:
            blocked.result()
        assert_in_time(BOUND, killed, blocked.ended)
        first = caught.value
        writer.release_reader(first.rank)
        with refuses(ReaderDied) as caught:
            writer.enqueue("never", timeout=PATIENCE)
        assert {first.rank, caught.value.rank} == {0, 1}
        assert {first.pid, caught.value.pid} == {remote.pid for remote in doomed}


def test_the_error_passes_through_a_pipe() -> None:
    """The error passes through a pipe with its attributes."""
    writer = start_writer(1, max_chunks=2)
    doomed = start_reader(writer.greeting)
    writer.call(fill)
    writer.begin("enqueue", "never").until_blocked()
    killed = doomed.peer.kill()
    with refuses(ReaderDied) as caught:
        writer.outcome()
    assert_in_time(BOUND, killed, writer.ended)
    assert (caught.value.rank, caught.value.pid) == (0, doomed.pid)
    writer.call("close")
