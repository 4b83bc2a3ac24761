"""cancel: an event that ends a reader's wait, and which outcome comes first."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from memlane import Cancelled
from tests.support import Aside
from tests.support.queues import drain, queue_of, refuses, set_event

pytestmark = pytest.mark.unit

Call = Callable[..., Any]
CALLS: dict[str, Call] = {
    "dequeue": lambda reader, **how: reader.dequeue(**how),
    "acquire_read": lambda reader, **how: reader.acquire_read(**how).__enter__(),
}
calls = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


@calls
@pytest.mark.parametrize("timeout", [None, 0, -1, 10, 0.0])
def test_cancel_wins_over_timeout(call: Call, timeout: float | None) -> None:
    """A set event raises RuntimeError("cancelled"), even if the time is over."""
    with queue_of() as (_, (reader,)):
        with refuses(RuntimeError, match="^cancelled$") as caught:
            call(reader, timeout=timeout, cancel=set_event())
        assert isinstance(caught.value, Cancelled)
        assert caught.value.args == ("cancelled",)


@pytest.mark.parametrize("timeout", [None, 0, -1, 10])
def test_a_message_wins_over_both(timeout: float | None) -> None:
    """An available message is delivered, even if cancelled and too late."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue("there")
        writer.enqueue("too")
        assert reader.dequeue(timeout=timeout, cancel=set_event()) == "there"
        with reader.acquire_read(timeout=timeout, cancel=set_event()) as chunk:
            assert b"too" in bytes(chunk)
        with refuses(Cancelled):
            reader.dequeue(timeout=timeout, cancel=set_event())


def test_an_event_that_is_not_set_changes_nothing() -> None:
    """An event that is not set neither ends nor prolongs the wait."""
    with queue_of() as (writer, (reader,)):
        event = threading.Event()
        with refuses(TimeoutError):
            reader.dequeue(timeout=0.01, cancel=event)
        writer.enqueue(1)
        assert reader.dequeue(cancel=event) == 1
        assert not event.is_set()


@calls
def test_an_event_cancels_a_blocked_call(call: Call) -> None:
    """Setting the event ends the wait; nothing is consumed, and the queue still works."""
    with queue_of(2) as (writer, (reader, other)):
        event = threading.Event()
        wait = Aside(call, reader, cancel=event).until_blocked()
        event.set()
        with refuses(Cancelled):
            wait.result()
        writer.enqueue(1)
        assert (reader.dequeue(), other.dequeue()) == (1, 1)
        event.clear()
        wait = Aside(reader.dequeue, cancel=event).until_blocked()
        writer.enqueue(2)
        assert wait.result() == 2
        assert drain(other) == [2]


def test_one_event_ends_the_waits_of_many_readers() -> None:
    """One event ends the waits that use it, and no others."""
    with queue_of(3) as (writer, readers):
        event = threading.Event()
        waits = [Aside(reader.dequeue, cancel=event).until_blocked() for reader in readers[:2]]
        bystander = Aside(readers[2].dequeue).until_blocked()
        event.set()
        for wait in waits:
            with refuses(Cancelled):
                wait.result()
        writer.enqueue(1)
        assert bystander.result() == 1
        assert [reader.dequeue() for reader in readers[:2]] == [1, 1]


@pytest.mark.parametrize("cancel", [True, 1, "event", object()])
def test_what_is_no_event(cancel: Any) -> None:
    """An object without is_set is refused, whether there is a message or not."""
    with queue_of() as (writer, (reader,)):
        with refuses(TypeError, ValueError):
            reader.dequeue(timeout=0, cancel=cancel)
        writer.enqueue(1)
        assert drain(reader) == [1]


class Broken(threading.Event):
    """An event whose is_set raises."""

    def is_set(self) -> bool:
        raise ZeroDivisionError


def test_an_event_that_raises() -> None:
    """Its error leaves the call, nothing is consumed, and the queue still works."""
    with queue_of() as (writer, (reader,)):
        with pytest.raises(ZeroDivisionError):
            reader.dequeue(cancel=Broken())
        writer.enqueue(1)
        assert drain(reader) == [1]


def test_the_writer_waits_without_cancel() -> None:
    """Only readers take an event: enqueue has a timeout and no more."""
    with queue_of() as (writer, _), pytest.raises(TypeError):
        writer.enqueue(1, timeout=0, cancel=set_event())  # type: ignore[call-arg]
