"""A poll that finds nothing is cheap: the text of its error is made only when it is read."""

import time
from collections.abc import Callable

import pytest

from memlane import TimedOut
from tests.support import is_sanitized, until
from tests.support.queues import failed, fill, queue_of

pytestmark = pytest.mark.unit


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


def is_cheap(poll: Callable[[], object], times: float) -> bool:
    """Other load makes either dearer at times, and neither cheaper."""
    return seconds_of(poll) < times * seconds_of(raise_an_error)


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer slows down one of the two")
def test_polls_cost_about_as_much_as_raising_their_error() -> None:
    """With four readers: /proc is not read, and the kernel is asked only now and then."""
    with queue_of(4) as (writer, readers):
        until(lambda: is_cheap(lambda: readers[0].dequeue(timeout=0), 12), "a poll is cheap")
        fill(writer)
        until(lambda: is_cheap(lambda: writer.enqueue(0, timeout=0), 15), "a poll is cheap")


def test_text_may_be_read_after_the_queue_was_closed() -> None:
    """The error keeps a snapshot, and nothing of the queue."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        empty = failed(reader.dequeue)
        fill(writer)
        full = failed(lambda timeout: writer.enqueue(0, timeout=timeout))
    assert str(empty).startswith("timed out after 0 s waiting for the writer (pid ")
    assert ", 2 behind, last progress " in str(full)
