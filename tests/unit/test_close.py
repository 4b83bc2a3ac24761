"""close: final for the end that closes, announced to the others."""

import gc
import os
import time
from collections.abc import Callable

import pytest

from memlane import Closed, MessageQueue, WriterDied
from tests.harness import PATIENCE, Aside, Link, start, until
from tests.queues import (
    drain,
    fill,
    path_of,
    queue_of,
    refuses,
    start_reader,
    start_writer,
)
from tests.remotes import remote_writer

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


def _close(_: Link, writer: MessageQueue, caplog: pytest.LogCaptureFixture) -> None:
    """In a forked child that is nobody's loss."""
    writer.close()
    assert not caplog.records


def test_before_a_reader_has_come(caplog: pytest.LogCaptureFixture) -> None:
    """The log names those that what was sent has not reached, if anything was."""
    for sent in range(2):
        writer = MessageQueue(2, 2)
        here = MessageQueue.create_from_handle(writer.export_handle(), 0)
        for number in range(sent):
            writer.enqueue(number)
        start(_close, writer, caplog).result()
        writer.close()
        writer.close()
        here.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 1
    assert "reader 1 (never attached)" in texts[0]
    assert "reader 0" not in texts[0]


@pytest.mark.parametrize("call", ON_READERS.values(), ids=ON_READERS.keys())
def test_a_closed_reader(call: Call) -> None:
    """After any number of closes, every call raises Closed, a RuntimeError."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        for _ in range(3):
            reader.close()
            with refuses(RuntimeError) as caught:
                call(reader)
            assert isinstance(caught.value, Closed)


@pytest.mark.parametrize("call", ON_WRITERS.values(), ids=ON_WRITERS.keys())
def test_a_closed_writer(call: Call) -> None:
    """After any number of closes, every call raises Closed, a RuntimeError."""
    with queue_of() as (writer, _):
        for _ in range(3):
            writer.close()
            with refuses(RuntimeError) as caught:
                call(writer)
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


def test_a_blocked_reader_is_told(method: str) -> None:
    """A waiting reader in another process gets Closed when the writer closes."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle(), 0, method)
        reader.begin("dequeue").until_blocked()
        writer.close()
        with refuses(Closed):
            reader.outcome()


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


def test_a_blocked_writer_goes_on_when_the_reader_closes(method: str) -> None:
    """A close in another process wakes the writer that waits for that reader."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle(), 0, method)
        fill(writer)
        write = Aside(writer.enqueue, "more").until_blocked()
        reader.call("close")
        assert write.result() is None


def test_all_readers_closed() -> None:
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
def test_a_with_block_announces_closed(role: str) -> None:
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


def test_dropping_the_last_reference_of_a_writer() -> None:
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


def test_close_in_any_order(method: str) -> None:
    """The writer first or the readers first, here or there: all end cleanly."""
    remote = start_writer(2, method)
    readers = [MessageQueue.create_from_handle(remote.greeting, rank) for rank in range(2)]
    remote.call("enqueue", 1)
    readers[0].close()
    remote.call("close")
    assert readers[1].dequeue() == 1
    with refuses(Closed):
        readers[1].dequeue()
    readers[1].close()
    remote.leave()


@pytest.mark.parametrize(("n_local", "n_remote"), [(2, 0), (0, 2), (1, 1)])
def test_when_every_reader_has_closed(
    n_local: int, n_remote: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A message a second later is sent all the same, with one warning that nobody reads it."""
    with remote_writer(n_remote, n_local) as writer:
        readers = [
            MessageQueue.create_from_handle(writer.export_handle(rank), rank) for rank in range(2)
        ]
        for reader in readers:
            writer.enqueue(1)
            closed = time.monotonic()
            reader.close()
            until(lambda: any(row.state == "closed" for row in writer.statistics().readers))
        until(lambda: all(row.state == "closed" for row in writer.statistics().readers))
        writer.enqueue(2)
        if time.monotonic() - closed < 1:  # as of a writer that ends when its readers do
            assert not caplog.records
        time.sleep(1.1)
        for number in range(30):  # more than there are chunks
            writer.enqueue(number)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("memlane", "WARNING")
    assert f"(pid {os.getpid()}) sends to nobody: reader 0, reader 1 closed" in record.getMessage()


@pytest.mark.parametrize(("n_local", "n_remote"), [(1, 0), (0, 1)])
def test_an_idle_writer_whose_readers_have_closed(
    n_local: int, n_remote: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first message after a pause logs it; none does while a reader is left or expected."""
    with remote_writer(n_remote, n_local) as writer:
        writer.enqueue(1)
        time.sleep(1.1)
        writer.enqueue(2)
        with MessageQueue.create_from_handle(writer.export_handle(0), 0):
            writer.enqueue(3)
        until(lambda: writer.statistics().readers[0].state == "closed")
        assert not caplog.records
        time.sleep(1.1)
        writer.enqueue(4)
        assert len(caplog.records) == 1


def test_one_reader_elsewhere_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """That all readers on this host have closed is not worth a word then."""
    with remote_writer(1, 1) as writer:
        for rank in range(2):
            reader = MessageQueue.create_from_handle(writer.export_handle(rank), rank)
            if rank == 0:
                reader.close()
        time.sleep(1.1)
        writer.enqueue(1)
        with writer.acquire_write() as chunk:
            chunk[0] = 1
        assert reader.dequeue(PATIENCE) == 1
        assert not caplog.records
        reader.close()
