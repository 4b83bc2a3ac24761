"""A poll that finds nothing is cheap: the text of its error is made only when it is read."""

import pickle
import time
from collections.abc import Callable

import pytest

from memlane import MessageQueue, TimedOut
from tests.harness import Remote, is_sanitized
from tests.queues import fill, queue_of, refuses, start_reader, start_writer


def failed(poll: Callable[..., object]) -> TimedOut:
    with refuses(TimedOut) as caught:
        poll(timeout=0)
    return caught.value


def seconds_of(call: Callable[[], object], rounds: int = 300) -> float:
    """The best of five times of a round."""
    best = float("inf")
    for _ in range(5):
        before = time.perf_counter()
        for _ in range(rounds):
            try:  # noqa: SIM105 - suppress() takes as long as what is measured
                call()
            except TimedOut:
                pass
        best = min(best, (time.perf_counter() - before) / rounds)
    return best


def raise_an_error() -> None:
    raise TimedOut("timed out after 0 s waiting for the writer", 0)


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer slows down one of the two")
def test_polls_cost_about_as_much_as_raising_their_error() -> None:
    """With four readers: /proc is not read, and the kernel is asked only now and then."""
    with queue_of(4) as (writer, readers):
        raising = seconds_of(raise_an_error)
        assert seconds_of(lambda: readers[0].dequeue(timeout=0)) < 12 * raising
        fill(writer)
        assert seconds_of(lambda: writer.enqueue(0, timeout=0)) < 15 * raising


def test_text_of_a_full_queue_says_what_its_reader_does_when_the_text_is_read() -> None:
    """The text does not change afterwards."""
    with MessageQueue(1, 1, [7], 256, 2) as writer:
        reader = start_reader(writer.export_handle(), 7)
        fill(writer)
        error = failed(lambda timeout: writer.enqueue(0, timeout=timeout))
        check_late_text(error, reader, f"reader 7 (pid {reader.pid}, stopped, 2 behind, last ")
        reader.call("close")


def test_text_of_an_empty_queue_says_what_its_writer_does_when_the_text_is_read() -> None:
    """The text does not change afterwards."""
    writer = start_writer()
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        error = failed(reader.dequeue)
        check_late_text(error, writer, f"the writer (pid {writer.pid}, stopped, last progress ")
        writer.call("close")


def check_late_text(error: TimedOut, other: Remote, words: str) -> None:
    other.peer.stop()
    text = str(error)
    other.peer.resume()
    assert text.startswith(f"timed out after 0 s waiting for {words}")
    assert str(error) == text
    assert repr(error) == f"TimedOut({text!r})"
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.args, copy.timeout) == ((text,), 0)


def test_text_may_be_read_after_the_queue_was_closed() -> None:
    """The error keeps a snapshot, and nothing of the queue."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        empty = failed(reader.dequeue)
        fill(writer)
        full = failed(lambda timeout: writer.enqueue(0, timeout=timeout))
    assert str(empty).startswith("timed out after 0 s waiting for the writer (pid ")
    assert ", 2 behind, last progress " in str(full)
