"""Numbered messages between processes: some until the test stops them, some of a given count."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from memlane import Handle, MessageQueue
from tests.support import PATIENCE, Link, holdings, surplus
from tests.support.queues import sweep

End = tuple[int, Exception, float]


@contextmanager
def leaving_nothing() -> Iterator[None]:
    """After the block and one more creation all is as before."""
    before = holdings("memlane-")
    yield
    sweep()
    left = surplus(before, holdings("memlane-"))
    assert not left, left


def message(number: int) -> tuple[int, bytes]:
    return number, b"." * (number % 150)


def read_to_the_end(queue: MessageQueue) -> End:
    """Returns how many messages came without a gap, the error after them, and its time."""
    for number in itertools.count():
        try:
            received = queue.dequeue(PATIENCE)
        except Exception as error:
            return number, error.with_traceback(None), time.monotonic()
        assert received == message(number), f"{received!r} instead of message {number}"
    raise AssertionError


def write_to_the_end(queue: MessageQueue, first: int = 0) -> End:
    """Returns how many messages were sent, the error after them, and its time."""
    for number in itertools.count(first):
        try:
            queue.enqueue(message(number), PATIENCE)
        except Exception as error:
            return number, error.with_traceback(None), time.monotonic()
    raise AssertionError


def reading(link: Link, handle: Handle, rank: int) -> End:
    queue = MessageQueue.create_from_handle(handle, rank)
    link.tell()
    end = read_to_the_end(queue)
    queue.close()
    return end


SIZE = 20_000


def numbered(number: int, size: int = SIZE) -> bytes:
    return number.to_bytes(8, "little") + bytes(size - 8)


def read_numbered(queue: MessageQueue, number: int = 0) -> tuple[int, Exception, float]:
    """Returns how many came in order, the error after them, and its time."""
    while True:
        try:
            message = queue.dequeue(PATIENCE)
        except Exception as error:
            return number, error.with_traceback(None), time.monotonic()
        assert message == numbered(number, len(message)), number
        number += 1


def write_numbered(writer: MessageQueue, count: int) -> None:
    for number in range(count):
        writer.enqueue(numbered(number), PATIENCE)
