"""Calls that belong to the other role raise WrongRole."""

from collections.abc import Callable

import pytest

from memlane import MessageQueue, WrongRole
from tests.support.queues import queue_of, refuses

pytestmark = pytest.mark.unit

READERS_ONLY: dict[str, Callable[[MessageQueue], object]] = {
    "dequeue": lambda end: end.dequeue(timeout=0),
    "acquire_read": lambda end: end.acquire_read(timeout=0).__enter__(),
    "iteration": lambda end: next(iter(end)),
}
WRITERS_ONLY: dict[str, Callable[[MessageQueue], object]] = {
    "enqueue": lambda end: end.enqueue(1, timeout=0),
    "acquire_write": lambda end: end.acquire_write(timeout=0).__enter__(),
    "export_handle": lambda end: end.export_handle(),
    "release_reader": lambda end: end.release_reader(0),
}


@pytest.mark.parametrize("call", READERS_ONLY.values(), ids=READERS_ONLY.keys())
def test_calls_for_readers_only_are_refused_to_a_writer(
    call: Callable[[MessageQueue], object],
) -> None:
    """A reader's call on a writer says that only readers may, and changes nothing."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue("kept")
        with refuses(RuntimeError, match="^Only readers can ") as caught:
            call(writer)
        assert isinstance(caught.value, WrongRole)
        assert writer.current_idx == 1
        assert reader.dequeue(timeout=0) == "kept"


@pytest.mark.parametrize("call", WRITERS_ONLY.values(), ids=WRITERS_ONLY.keys())
def test_calls_for_writers_only_are_refused_to_a_reader(
    call: Callable[[MessageQueue], object],
) -> None:
    """A writer's call on a reader says that only the writer may, and sends nothing."""
    with queue_of() as (_, (reader,)):
        with refuses(RuntimeError, match="^Only (the )?writers? can ") as caught:
            call(reader)
        assert isinstance(caught.value, WrongRole)
        assert reader.current_idx == 0
        with refuses(TimeoutError):
            reader.dequeue(timeout=0)


def test_the_error_of_dequeue_has_the_text_that_users_search_for() -> None:
    """The text that users search for."""
    with queue_of() as (writer, _), refuses(WrongRole, match="Only readers can dequeue: make one"):
        writer.dequeue()
