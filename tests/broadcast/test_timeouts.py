"""Timeouts of enqueue, dequeue and chunks: in seconds, one deadline, nothing half done."""

import math
import time
from collections.abc import Callable
from typing import Any

import pytest

from memlane import InvalidArgument, MessageQueue, TimedOut
from tests.support import PATIENCE, Aside
from tests.support.queues import drain, fill, queue_of, refuses

pytestmark = pytest.mark.unit

EXPIRED = [0, 0.0, -0.0, -1, -1e-9, -1e300, -math.inf, -(2**70)]
Call = Callable[[MessageQueue, MessageQueue, Any], object]
CALLS: dict[str, Call] = {
    "dequeue": lambda _writer, reader, timeout: reader.dequeue(timeout=timeout),
    "acquire_read": lambda _writer, reader, timeout: reader.acquire_read(timeout).__enter__(),
    "enqueue": lambda writer, _reader, timeout: writer.enqueue("late", timeout=timeout),
    "acquire_write": lambda writer, _reader, timeout: writer.acquire_write(timeout).__enter__(),
}
calls = pytest.mark.parametrize(("name", "call"), CALLS.items(), ids=CALLS.keys())


def block(name: str, writer: MessageQueue) -> int:
    """Bring the queue into the state in which the call has to wait."""
    return fill(writer) if name in ("enqueue", "acquire_write") else 0


@calls
@pytest.mark.parametrize("timeout", EXPIRED)
def test_expired_timeouts_poll_and_change_nothing(name: str, call: Call, timeout: float) -> None:
    """Zero and negative values poll, and change nothing."""
    with queue_of() as (writer, (reader,)):
        count = block(name, writer)
        for _ in range(3):
            with refuses(TimeoutError) as caught:
                call(writer, reader, timeout)
            assert isinstance(caught.value, TimedOut)
        assert drain(reader) == list(range(count))
        writer.enqueue("next")
        assert drain(reader) == ["next"]


@calls
def test_expiry_comes_after_the_timeout(name: str, call: Call) -> None:
    """A timeout is never early, and one deadline counts for the whole call."""
    with queue_of(2) as (writer, readers):
        block(name, writer)
        before = time.monotonic()
        with refuses(TimedOut):
            call(writer, readers[0], 0.25)
        assert time.monotonic() - before >= 0.25


@calls
@pytest.mark.parametrize("timeout", [math.nan, -math.nan])
def test_nan_is_no_timeout(name: str, call: Call, timeout: float) -> None:
    """NaN is no timeout, whether the call would have to wait or not."""
    with queue_of() as (writer, (reader,)):
        with refuses(ValueError) as caught:
            call(writer, reader, timeout)
        assert isinstance(caught.value, InvalidArgument)
        count = block(name, writer)
        with refuses(InvalidArgument):
            call(writer, reader, timeout)
        assert drain(reader) == list(range(count))


@calls
@pytest.mark.parametrize("timeout", ["1", b"1", [1], 1j])
def test_what_is_no_number(name: str, call: Call, timeout: Any) -> None:
    """Anything but a number or None is refused."""
    with queue_of() as (writer, (reader,)), refuses(TypeError, ValueError):
        block(name, writer)
        call(writer, reader, timeout)


@pytest.mark.parametrize("timeout", ["1", math.nan])
def test_an_invalid_timeout_closes_nothing(timeout: Any) -> None:
    """An invalid timeout closes nothing, on either end."""
    with queue_of() as (writer, (reader,)):
        for end in (reader, writer):
            with refuses(TypeError, ValueError):
                end.close(timeout)
        writer.enqueue("still open")
        assert reader.dequeue(PATIENCE) == "still open"


@pytest.mark.parametrize("timeout", [None, 0, -1, 1, 0.5, 1e300, math.inf, 2**70])
def test_what_need_not_wait_does_not_time_out(timeout: float | None) -> None:
    """An available message, or a free chunk, is used whatever the timeout."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1, timeout=timeout)
        with writer.acquire_write(timeout=timeout) as chunk:
            chunk[0] = 2
        assert reader.dequeue(timeout=timeout) == 1
        with reader.acquire_read(timeout=timeout) as chunk:
            assert chunk[0] == 2


@pytest.mark.parametrize("timeout", [None, 1e9, 1e300, math.inf, 2**70])
def test_long_timeouts_do_wait(timeout: float | None) -> None:
    """Timeouts beyond every clock neither overflow nor expire."""
    with queue_of(max_chunks=1) as (writer, (reader,)):
        read = Aside(reader.dequeue, timeout=timeout).until_blocked()
        writer.enqueue(1)
        assert read.result() == 1
        writer.enqueue(2)
        write = Aside(writer.enqueue, 3, timeout=timeout).until_blocked()
        assert reader.dequeue() == 2
        assert write.result() is None
        assert reader.dequeue() == 3


def test_a_timeout_of_dequeue_consumes_nothing() -> None:
    """The next call gets the message that was late, in order, however many gave up before."""
    with queue_of(2) as (writer, readers):
        for number in range(20):
            for reader in readers:
                with refuses(TimedOut):
                    reader.dequeue(timeout=0.001 * (number % 3))
            writer.enqueue(number)
            assert [reader.dequeue(timeout=0) for reader in readers] == [number] * 2


def test_a_timeout_of_enqueue_sends_nothing() -> None:
    """A message that timed out never arrives, neither whole nor in part."""
    with queue_of(2, max_chunks=2) as (writer, (fast, slow)):
        fill(writer)
        assert drain(fast) == [0, 1]
        for timeout in (0, 0.01, -1):
            with refuses(TimedOut):
                writer.enqueue(b"never" * 100, timeout=timeout)
        assert drain(fast) == []
        assert drain(slow) == [0, 1]
        writer.enqueue("next", timeout=0)
        assert (drain(fast), drain(slow)) == (["next"], ["next"])


def test_the_error_of_enqueue_names_the_slow_reader() -> None:
    """TimedOut names the rank and pid of the reader waited for, and of no other."""
    import os

    with MessageQueue(2, 2, [71, 83], 256, 2) as writer:
        fast = MessageQueue.create_from_handle(writer.export_handle(), 71)
        slow = MessageQueue.create_from_handle(writer.export_handle(), 83)
        fill(writer)
        drain(fast)
        with refuses(TimedOut) as caught:
            writer.enqueue(0, timeout=0.01)
        text = str(caught.value)
        assert "83" in text
        assert str(os.getpid()) in text
        fast.close()
        slow.close()
