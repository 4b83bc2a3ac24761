"""MessageQueue: its documented attributes, on every kind of end."""

import pytest

from memlane import MessageQueue, ShmRingBuffer
from tests.support import PATIENCE
from tests.support.queues import queue_of, ring_in

pytestmark = pytest.mark.unit


def test_the_writers_attributes_are_set() -> None:
    """The writer's end."""
    with queue_of(2) as (writer, _):
        assert (writer._is_writer, writer._is_local_reader, writer._is_remote_reader) == (
            True,
            False,
            False,
        )
        assert (writer.n_local_reader, writer.n_remote_reader) == (2, 0)
        assert writer.local_reader_rank == -1
        assert writer.current_idx == 0
        assert isinstance(ring_in(writer), ShmRingBuffer)
        assert ring_in(writer).is_creator
        assert (writer.local_socket, writer.remote_socket) == (None, None)
        assert writer.handle.buffer_handle == ring_in(writer).handle()


def test_the_readers_attributes_are_set() -> None:
    """A local reader's end; its flag is its position in the list of ranks."""
    with MessageQueue(3, 3, [7, 3, 11], 64, 2) as writer:
        for position, rank in enumerate([7, 3, 11]):
            reader = MessageQueue.create_from_handle(writer.export_handle(rank), rank)
            assert reader.local_reader_rank == position
            assert (reader._is_writer, reader._is_local_reader, reader._is_remote_reader) == (
                False,
                True,
                False,
            )
            assert reader.current_idx == 0
            assert reader.buffer is not None
            assert not ring_in(reader).is_creator
            assert ring_in(reader).handle() == ring_in(writer).handle()
            assert (reader.local_socket, reader.remote_socket) == (None, None)
            assert reader.handle.local_reader_ranks == [7, 3, 11]
            reader.close()


def test_readers_know_the_counts() -> None:
    """Readers know how many readers there are, or say nothing wrong about it."""
    with queue_of(2) as (_, readers):
        for reader in readers:
            assert getattr(reader, "n_local_reader", 2) == 2
            assert getattr(reader, "n_remote_reader", 0) == 0


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("get", "dequeue()"),
        ("get_nowait", "dequeue(timeout=0)"),
        ("put", "enqueue()"),
        ("put_nowait", "enqueue(obj, timeout=0)"),
        ("qsize", "statistics()"),
        ("empty", "dequeue(timeout=0)"),
        ("task_done", None),
    ],
)
def test_attributes_of_other_queues_name_the_call_to_use(name: str, instead: str | None) -> None:
    """They are no attributes; the error names the call to use, if there is one."""
    with queue_of(1) as (writer, _):
        assert not hasattr(writer, name)
        with pytest.raises(AttributeError) as refused:
            getattr(writer, name)
    text = f"'MessageQueue' object has no attribute '{name}'"
    assert str(refused.value).startswith(text if instead is None else f"{text}; use {instead}")


def test_a_queue_of_a_type_is_a_queue() -> None:
    """`MessageQueue[Step]` is for checkers; nothing changes when the program runs."""
    with MessageQueue[int](1, 1) as writer:
        assert type(writer) is MessageQueue
        with MessageQueue[int].create_from_handle(writer.export_handle(), 0) as reader:
            writer.enqueue("no number")  # type: ignore[arg-type]
            assert reader.dequeue(timeout=PATIENCE) == "no number"


def test_current_idx_goes_round() -> None:
    """The index of the next chunk advances by one with every message and wraps."""
    with queue_of(2, max_chunks=3) as (writer, readers):
        for count in range(1, 8):
            writer.enqueue(count)
            assert writer.current_idx == count % 3
            for reader in readers:
                reader.dequeue()
                assert reader.current_idx == count % 3


def test_a_writer_without_readers_has_no_ring() -> None:
    """A writer without readers has no ring."""
    with MessageQueue(0, 0) as writer:
        assert writer.buffer is None
        assert writer.current_idx == -1
        assert writer.local_reader_rank == -1
        assert (writer._is_writer, writer._is_local_reader) == (True, False)
        assert (writer.n_local_reader, writer.n_remote_reader) == (0, 0)
        assert writer.handle.buffer_handle is None
        assert writer.handle.remote_subscribe_addr is None
        assert writer.handle.local_reader_ranks == []
