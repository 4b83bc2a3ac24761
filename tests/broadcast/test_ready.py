"""wait_until_ready: returns when all are here, or names those that are missing."""

import math

import pytest

from memlane import MessageQueue
from tests.support import PATIENCE
from tests.support.queues import (
    path_of,
    queue_of,
    refuses,
    ring_in,
)

pytestmark = pytest.mark.unit


def test_returns_when_all_have_attached() -> None:
    """The ends need not call it at the same time."""
    with queue_of(2, ready=False) as (writer, readers):
        for end in (readers[1], writer, readers[0], writer):
            end.wait_until_ready(timeout=0)


def test_names_who_is_missing() -> None:
    """On timeout the error names the missing ranks, and no others."""
    with MessageQueue(3, 3, [17, 23, 31], 64, 2) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(23), 23)
        for end in (writer, reader):
            with refuses(TimeoutError) as caught:
                end.wait_until_ready(timeout=0.05)
            text = str(caught.value)
            assert "17" in text
            assert "31" in text
            assert "23" not in text.replace(ring_in(writer).shared_memory.name, "")
        reader.close()


def test_timeouts_are_checked() -> None:
    """Negative is expired already, NaN is refused."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        with refuses(TimeoutError):
            writer.wait_until_ready(-1)
        with refuses(ValueError):
            writer.wait_until_ready(math.nan)


def test_the_writer_removes_the_name() -> None:
    """M13: the name is gone when the writer's call returns, and the queue works on."""
    with queue_of(2, ready=False) as (writer, readers):
        for reader in readers:
            reader.wait_until_ready(PATIENCE)
        assert path_of(writer).exists()
        writer.wait_until_ready(PATIENCE)
        assert not path_of(writer).exists()
        for number in range(10):
            writer.enqueue(number)
            assert [reader.dequeue() for reader in readers] == [number, number]


def test_the_queue_works_before_it() -> None:
    """Messages that were sent before all were ready are there afterwards."""
    with MessageQueue(1, 1, None, 4096, 4) as writer:
        writer.enqueue(1)
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        writer.enqueue(2)
        assert reader.dequeue() == 1
        writer.wait_until_ready(PATIENCE)
        reader.wait_until_ready(PATIENCE)
        writer.enqueue(3)
        assert [reader.dequeue(), reader.dequeue()] == [2, 3]
        reader.close()


def test_a_writer_without_readers_is_always_ready() -> None:
    """A group of one is always ready."""
    with MessageQueue(0, 0) as writer:
        writer.wait_until_ready()
        writer.wait_until_ready(0)
