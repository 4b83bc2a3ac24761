"""The flags of a queue's ring follow the documented table, step by step."""

import pytest

from memlane import MessageQueue
from tests.support.queues import drain, flags, queue_of, ring_in

pytestmark = pytest.mark.unit


def test_the_flags_follow_the_life_of_a_chunk() -> None:
    """Not written, just written, read by some, read by all, written again."""
    with queue_of(3, max_chunks=2) as (writer, readers):
        ring = ring_in(writer)
        assert flags(ring, 0) == [0, 0, 0, 0]
        writer.enqueue(1)
        assert flags(ring, 0) == [1, 0, 0, 0]
        assert flags(ring, 1) == [0, 0, 0, 0]
        readers[1].dequeue()
        assert flags(ring, 0) == [1, 0, 1, 0]
        readers[2].dequeue()
        assert flags(ring, 0) == [1, 0, 1, 1]
        readers[0].dequeue()
        assert flags(ring, 0) == [1, 1, 1, 1]
        writer.enqueue(2)
        assert [flags(ring, chunk) for chunk in range(2)] == [[1, 1, 1, 1], [1, 0, 0, 0]]
        for reader in readers:
            reader.dequeue()
        writer.enqueue(3)
        assert [flags(ring, chunk) for chunk in range(2)] == [[1, 0, 0, 0], [1, 1, 1, 1]]


def test_both_ends_see_the_same_flags() -> None:
    """Reader and writer see the same ring."""
    with queue_of(2, max_chunks=2) as (writer, readers):
        writer.enqueue(1)
        readers[0].dequeue()
        for end in (writer, *readers):
            assert flags(ring_in(end), 0) == [1, 1, 0]


def test_a_flag_is_the_position_of_its_rank() -> None:
    """Ranks need not be positions: the second rank of the list has the second flag."""
    with MessageQueue(2, 2, [9, 4], 64, 2) as writer:
        readers = {
            rank: MessageQueue.create_from_handle(writer.export_handle(rank), rank)
            for rank in (4, 9)
        }
        writer.enqueue(1)
        readers[4].dequeue()
        assert flags(ring_in(writer), 0) == [1, 0, 1]
        readers[9].dequeue()
        assert flags(ring_in(writer), 0) == [1, 1, 1]
        for reader in readers.values():
            reader.close()


def test_raw_chunks_use_the_same_flags() -> None:
    """Chunks filled and read by hand follow the same table."""
    with queue_of(1, max_chunks=1) as (writer, (reader,)):
        for _ in range(3):
            with writer.acquire_write():
                assert flags(ring_in(writer), 0)[0] == 0
            assert flags(ring_in(writer), 0) == [1, 0]
            with reader.acquire_read():
                assert flags(ring_in(writer), 0) == [1, 0]
            assert flags(ring_in(writer), 0) == [1, 1]
        assert drain(reader) == []
