"""close: final for the end that closes, announced to the others."""

import gc
import os
from collections.abc import Callable

import pytest

from memlane import Closed, MessageQueue, WriterDied
from tests.support import PATIENCE, Aside
from tests.support.queues import drain, fill, path_of, queue_of, refuses

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

Call = Callable[[MessageQueue], object]
ON_READERS: dict[str, Call] = {
    "dequeue": lambda end: end.dequeue(),
    "poll": lambda end: end.dequeue(timeout=0),
    "acquire_read": lambda end: end.acquire_read().__enter__(),
    "wait_until_ready": lambda end: end.wait_until_ready(),
    "broadcast_object": lambda end: end.broadcast_object(),
    "with": lambda end: end.__enter__(),
}
ON_WRITERS: dict[str, Call] = {
    "enqueue": lambda end: end.enqueue(1),
    "acquire_write": lambda end: end.acquire_write().__enter__(),
    "wait_until_ready": lambda end: end.wait_until_ready(),
    "broadcast_object": lambda end: end.broadcast_object(1),
    "release_reader": lambda end: end.release_reader(0),
    "export_handle": lambda end: end.export_handle(),
    "with": lambda end: end.__enter__(),
}


ON_ENDS = [
    *[pytest.param(0, call, id=f"reader-{name}") for name, call in ON_READERS.items()],
    *[pytest.param(1, call, id=f"writer-{name}") for name, call in ON_WRITERS.items()],
]


@pytest.mark.parametrize(("is_writer", "call"), ON_ENDS)
def test_every_call_of_a_closed_end_raises_closed(is_writer: int, call: Call) -> None:
    """A RuntimeError, after any number of closes."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        end = (reader, writer)[is_writer]
        for _ in range(3):
            end.close()
            with refuses(RuntimeError) as caught:
                call(end)
            assert isinstance(caught.value, Closed)


def test_readers_get_what_is_queued_then_closed() -> None:
    """The writer's close loses no message; afterwards every call raises Closed."""
    with queue_of(2) as (writer, readers):
        count = fill(writer)
        readers[0].dequeue()
        writer.close()
        assert [readers[0].dequeue() for _ in range(count - 1)] == list(range(1, count))
        assert [readers[1].dequeue(timeout=0) for _ in range(count)] == list(range(count))
        for reader in readers:
            for timeout in (None, 0, 1):
                with refuses(Closed):
                    reader.dequeue(timeout=timeout)
            with refuses(Closed), reader.acquire_read():
                pass


def test_nobody_waits_for_a_reader_that_closed() -> None:
    """Its unread messages are released, and it is not waited for again."""
    with queue_of(2, max_chunks=2) as (writer, (stays, leaves)):
        assert fill(writer) == 2
        assert drain(stays) == [0, 1]
        with refuses(TimeoutError):
            writer.enqueue(2, timeout=0)
        leaves.close()
        for number in range(2, 10):
            writer.enqueue(number, timeout=0)
            assert stays.dequeue(timeout=0) == number


def test_a_writer_whose_readers_have_all_closed_does_not_wait() -> None:
    """Without readers the writer keeps nothing and does not wait."""
    with queue_of(2, max_chunks=2) as (writer, readers):
        fill(writer)
        for reader in readers:
            reader.close()
        for number in range(10):
            writer.enqueue(number, timeout=0)


def test_a_reader_that_closes_while_holding_a_chunk() -> None:
    """The chunk it was reading is free for the writer."""
    with queue_of(max_chunks=1) as (writer, (reader,)):
        writer.enqueue(1)
        block = reader.acquire_read()
        block.__enter__()
        reader.close()
        writer.enqueue(2, timeout=0)
        del block


def test_closing_removes_the_name() -> None:
    """A writer that closes before all have attached removes the name; a reader does not."""
    with queue_of(1, ready=False) as (writer, (reader,)):
        reader.close()
        assert path_of(writer).exists()
        path = path_of(writer)
        writer.close()
        assert not path.exists()


@pytest.mark.parametrize("blocked", ["dequeue", "acquire_read", "wait_until_ready"])
def test_close_from_another_thread_wakes_a_reader(blocked: str) -> None:
    """The blocked call raises Closed, and the end is closed."""
    with MessageQueue(2, 2, None, 64, 2) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        wait = Aside(ON_READERS[blocked], reader).until_blocked()
        reader.close()
        with refuses(Closed):
            wait.result()
        with refuses(Closed):
            reader.dequeue()


@pytest.mark.parametrize("blocked", ["enqueue", "acquire_write", "wait_until_ready"])
def test_close_from_another_thread_wakes_the_writer(blocked: str) -> None:
    """The blocked call raises Closed and has sent nothing."""
    with MessageQueue(2, 2, None, 64, 2) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        count = fill(writer)
        wait = Aside(ON_WRITERS[blocked], writer).until_blocked()
        writer.close()
        with refuses(Closed):
            wait.result()
        assert [reader.dequeue() for _ in range(count)] == list(range(count))
        with refuses(Closed):
            reader.dequeue()
        reader.close()


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_leaving_a_with_block_closes_the_queue(role: str) -> None:
    """Leaving a with block without an exception is a close."""
    with queue_of(max_chunks=1) as (writer, (reader,)):
        if role == "writer":
            with writer as same:
                assert same is writer
            with refuses(Closed):
                reader.dequeue()
        else:
            with reader as same:
                assert same is reader
            writer.enqueue(1, timeout=0)
            writer.enqueue(2, timeout=0)


def test_a_with_block_left_by_an_exception_announces_nothing() -> None:
    """The end is closed for its owner, and its peers see a death with that pid."""

    with queue_of() as (writer, (reader,)):
        writer.enqueue("complete")
        with pytest.raises(KeyError), writer:
            raise KeyError
        with refuses(Closed):
            writer.enqueue(1)
        assert reader.dequeue() == "complete"
        with refuses(WriterDied) as caught:
            reader.dequeue(timeout=PATIENCE)
        assert caught.value.pid == os.getpid()


def test_dropping_the_last_reference_of_a_writer_is_its_death() -> None:
    """It frees everything and announces nothing: the reader sees a death with that pid."""

    writer = MessageQueue(1, 1, None, 64, 2)
    path = path_of(writer)
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    writer.enqueue("complete")
    del writer
    gc.collect()
    assert not path.exists()
    assert reader.dequeue() == "complete"
    with refuses(WriterDied) as caught:
        reader.dequeue(timeout=PATIENCE)
    assert caught.value.pid == os.getpid()
    reader.close()
