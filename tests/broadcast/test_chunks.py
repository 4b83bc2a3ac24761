"""acquire_write and acquire_read: chunks filled and read by hand."""

import pytest

from memlane import MessageQueue
from tests.support import Aside
from tests.support.queues import (
    drain,
    fill,
    first_byte,
    flags,
    queue_of,
    refuses,
    ring_in,
)

pytestmark = pytest.mark.unit


def write_byte(queue: MessageQueue, value: int) -> None:
    with queue.acquire_write() as chunk:
        chunk[0] = value


def spoil(queue: MessageQueue) -> None:
    with queue.acquire_write(timeout=0) as chunk:
        chunk[:] = b"x" * len(chunk)
        raise KeyError


def test_bytes_go_through() -> None:
    """Every reader reads the bytes that were written into the block, lap after lap."""
    with queue_of(2, max_chunk_bytes=100, max_chunks=3) as (writer, readers):
        for number in range(10):
            with writer.acquire_write() as chunk:
                assert (len(chunk), chunk.readonly, chunk.format) == (100, False, "B")
                chunk[:] = bytes([number]) * 100
            for reader in readers:
                with reader.acquire_read() as chunk:
                    assert (len(chunk), chunk.format) == (100, "B")
                    assert bytes(chunk) == bytes([number]) * 100


def test_index_advances_when_the_block_is_left() -> None:
    """current_idx names the chunk that is held, and moves on afterwards."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        for number in range(5):
            with writer.acquire_write():
                assert writer.current_idx == number % 2
            assert writer.current_idx == (number + 1) % 2
            with reader.acquire_read():
                assert reader.current_idx == number % 2
            assert reader.current_idx == (number + 1) % 2


def test_nothing_is_published_before_the_block_is_left() -> None:
    """No reader sees a chunk while it is being written."""
    with queue_of() as (writer, (reader,)):
        with writer.acquire_write() as chunk:
            chunk[0] = 1
            assert flags(ring_in(writer), 0)[0] == 0
            with refuses(TimeoutError):
                reader.dequeue(timeout=0)
        assert flags(ring_in(writer), 0) == [1, 0]


def test_a_chunk_is_not_released_before_the_block_is_left() -> None:
    """A chunk that is being read is not written over."""
    with queue_of(max_chunks=1) as (writer, (reader,)):
        writer.enqueue(1)
        with reader.acquire_read():
            assert flags(ring_in(writer), 0) == [1, 0]
            with refuses(TimeoutError):
                writer.enqueue(2, timeout=0)
        assert flags(ring_in(writer), 0) == [1, 1]
        writer.enqueue(2, timeout=0)


@pytest.mark.parametrize("lap", range(4))
def test_a_write_that_is_left_by_an_exception_publishes_nothing(lap: int) -> None:
    """It publishes nothing and does not advance; the next message takes the chunk."""
    with queue_of(2, max_chunks=3) as (writer, readers):
        for number in range(lap):
            writer.enqueue(number)
        received = [drain(reader) for reader in readers]
        for _ in range(4):
            with pytest.raises(KeyError):
                spoil(writer)
            assert writer.current_idx == lap % 3
            assert [drain(reader) for reader in readers] == [[], []]
        writer.enqueue("next", timeout=0)
        for reader, before in zip(readers, received, strict=True):
            assert before == list(range(lap))
            assert reader.dequeue(timeout=0) == "next"


def test_leaving_a_read_by_an_exception() -> None:
    """It releases the chunk: the message is consumed."""
    with queue_of(max_chunks=1) as (writer, (reader,)):
        for number in range(3):
            writer.enqueue(number, timeout=0)
            with pytest.raises(KeyError), reader.acquire_read(timeout=0):
                raise KeyError
            assert flags(ring_in(writer), 0) == [1, 1]
        assert drain(reader) == []


def test_acquire_read_shows_the_raw_bytes_of_a_message() -> None:
    """acquire_read of an enqueued message yields the whole chunk with memlane's own format."""
    with queue_of(max_chunk_bytes=300) as (writer, (reader,)):
        writer.enqueue("a needle in the chunk")
        with reader.acquire_read() as chunk:
            assert len(chunk) == 300
            assert b"a needle in the chunk" in bytes(chunk)
        writer.enqueue(2)
        assert reader.dequeue() == 2


def test_chunks_and_messages_keep_their_common_order() -> None:
    """Hand-filled chunks and messages keep their common order."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        for number in range(20):
            if number % 3:
                writer.enqueue(number)
                assert reader.dequeue() == number
            else:
                with writer.acquire_write() as chunk:
                    chunk[0] = number
                with reader.acquire_read() as chunk:
                    assert chunk[0] == number


def test_blocked_until_there_is_a_chunk() -> None:
    """Both wait, and are woken by the other side."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        reads = Aside(first_byte, reader).until_blocked()
        write_byte(writer, 7)
        assert reads.result() == 7
        assert fill(writer) == 2
        writes = Aside(write_byte, writer, 9).until_blocked()
        assert reader.dequeue() == 0
        assert writes.result() is None
        assert reader.dequeue() == 1
        assert first_byte(reader) == 9


def test_the_wait_begins_with_the_block() -> None:
    """Calling acquire_read does nothing yet: entering the block takes the chunk."""
    with queue_of() as (writer, (reader,)):
        pending = reader.acquire_read(timeout=0)
        writer.enqueue(1)
        with pending as chunk:
            assert len(chunk) == 4096
        assert drain(reader) == []


def test_a_call_inside_a_block_is_refused() -> None:
    """While a block holds the chunk, the same end refuses other calls and is not disturbed."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        writer.enqueue(2)
        with reader.acquire_read():
            with refuses(RuntimeError):
                reader.dequeue(timeout=0)
            with refuses(RuntimeError), reader.acquire_read(timeout=0):
                pass
        assert reader.dequeue(timeout=0) == 2
        with writer.acquire_write() as chunk:
            chunk[0] = 3
            with refuses(RuntimeError):
                writer.enqueue(4, timeout=0)
            with refuses(RuntimeError), writer.acquire_write(timeout=0):
                pass
        with reader.acquire_read(timeout=0) as chunk:
            assert chunk[0] == 3
        assert drain(reader) == []
