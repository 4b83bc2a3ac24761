"""A queue without readers, and broadcast_object on both ends."""

import pytest

from memlane import MessageQueue, WrongRole
from tests.support.queues import queue_of, refuses, segments

pytestmark = pytest.mark.unit


def test_without_readers_nothing_is_kept() -> None:
    """enqueue returns at once for any object, and no segment exists."""
    before = segments()
    with MessageQueue(0, 0) as writer:
        assert segments() == before
        for _ in range(100):
            writer.enqueue(bytes(1000), timeout=0)
        writer.enqueue(bytes(20 * 1024 * 1024))
        assert segments() == before


def test_without_readers_the_rest_works() -> None:
    """Roles, readiness, handles, statistics and close are as on any writer."""
    writer = MessageQueue(0, 0)
    writer.wait_until_ready(0)
    assert writer.broadcast_object([1]) == [1]
    with refuses(WrongRole):
        writer.dequeue(timeout=0)
    assert writer.export_handle().buffer_handle is None
    assert writer.statistics().role == "writer"
    assert writer.statistics().readers == ()
    assert "MessageQueue" in repr(writer)
    writer.close()
    writer.close()
    with refuses(RuntimeError):
        writer.enqueue(1)


@pytest.mark.parametrize("message", [None, 0, "text", [1, {2: 3}]])
def test_broadcast_object_returns_an_equal_object_to_all(message: object) -> None:
    """The writer sends and gets its own object back; every reader gets an equal one."""
    with queue_of(2) as (writer, readers):
        assert writer.broadcast_object(message) is message
        assert [reader.broadcast_object() for reader in readers] == [message, message]


def test_broadcast_object_keeps_the_order() -> None:
    """It is enqueue and dequeue by another name."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        writer.broadcast_object(2)
        writer.enqueue(3)
        assert [reader.broadcast_object(), reader.dequeue(), reader.broadcast_object()] == [1, 2, 3]
