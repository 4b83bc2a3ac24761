"""Iterating over a reader: all messages until the writer closes."""

import itertools

import pytest

from memlane import CorruptMessage, MessageQueue
from tests.support import Aside
from tests.support.queues import queue_of

pytestmark = pytest.mark.unit


def read_all(reader: MessageQueue) -> list[object]:
    return list(reader)


def test_ends_when_the_writer_has_closed() -> None:
    """A for loop gets everything that was sent, and ends."""
    with queue_of(2) as (writer, readers):
        for number in range(3):
            writer.enqueue(number)
        writer.close()
        assert [list(reader) for reader in readers] == [[0, 1, 2], [0, 1, 2]]
        assert list(readers[0]) == []


def test_iteration_waits_for_messages() -> None:
    """A loop that has caught up waits for more, and for the end."""
    with queue_of() as (writer, (reader,)):
        loop = Aside(read_all, reader).until_blocked()
        for number in range(100):
            writer.enqueue(number)
        writer.close()
        assert loop.result() == list(range(100))


def test_can_be_left_and_entered_again() -> None:
    """A loop that is left early has consumed exactly what it got."""
    with queue_of() as (writer, (reader,)):
        for number in range(4):
            writer.enqueue(number)
        assert list(itertools.islice(reader, 2)) == [0, 1]
        assert reader.dequeue() == 2
        assert next(iter(reader)) == 3


def test_a_message_that_raises_does_not_end_the_queue() -> None:
    """A message's error leaves the loop; a new loop continues after it."""
    with queue_of() as (writer, (reader,)):
        with writer.acquire_write() as chunk:
            chunk[0] = 255
        writer.enqueue("next")
        writer.close()
        with pytest.raises(CorruptMessage):
            next(iter(reader))
        assert list(reader) == ["next"]
