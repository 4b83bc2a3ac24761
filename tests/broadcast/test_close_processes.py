"""close: final for the process that closes, announced to the others."""

import logging
import os
import time

import pytest

from memlane import Closed, MessageQueue
from tests.support import PATIENCE, Aside, Link, start, until
from tests.support.queues import fill, refuses, start_reader, start_writer
from tests.support.remote_queues import remote_writer

pytestmark = pytest.mark.wheel


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


def test_a_blocked_reader_is_told(method: str) -> None:
    """A waiting reader in another process gets Closed when the writer closes."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle(), 0, method)
        reader.begin("dequeue").until_blocked()
        writer.close()
        with refuses(Closed):
            reader.outcome()


def test_a_blocked_writer_goes_on_when_the_reader_closes(method: str) -> None:
    """A close in another process wakes the writer that waits for that reader."""
    with MessageQueue(1, 1, None, 64, 2) as writer:
        reader = start_reader(writer.export_handle(), 0, method)
        fill(writer)
        write = Aside(writer.enqueue, "more").until_blocked()
        reader.call("close")
        assert write.result() is None


def test_ends_close_in_any_order(method: str) -> None:
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


def said_of_nobody(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """The warnings about it; a slow machine may be the cause of others."""
    return [record for record in caplog.records if "sends to nobody" in record.getMessage()]


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
            assert not said_of_nobody(caplog)
        time.sleep(1.1)  # the time is what is tested
        for number in range(30):  # more than there are chunks
            writer.enqueue(number)
    (record,) = said_of_nobody(caplog)
    assert (record.name, record.levelname) == ("memlane", "WARNING")
    assert f"(pid {os.getpid()}) sends to nobody: reader 0, reader 1 left" in record.getMessage()


@pytest.mark.parametrize(("n_local", "n_remote"), [(1, 0), (0, 1)])
def test_an_idle_writer_whose_readers_have_closed(
    n_local: int, n_remote: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The first message after a pause logs it; none does while a reader is left or expected."""
    with remote_writer(n_remote, n_local) as writer:
        writer.enqueue(1)
        time.sleep(1.1)  # the time is what is tested
        writer.enqueue(2)
        with MessageQueue.create_from_handle(writer.export_handle(0), 0):
            writer.enqueue(3)
        until(lambda: writer.statistics().readers[0].state == "closed")
        assert not said_of_nobody(caplog)
        time.sleep(1.1)  # the time is what is tested
        writer.enqueue(4)
        assert len(said_of_nobody(caplog)) == 1


def test_one_reader_elsewhere_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """That all readers on this host have closed is not worth a word then."""
    with remote_writer(1, 1) as writer:
        for rank in range(2):
            reader = MessageQueue.create_from_handle(writer.export_handle(rank), rank)
            if rank == 0:
                reader.close()
        time.sleep(1.1)  # the time is what is tested
        writer.enqueue(1)
        with writer.acquire_write() as chunk:
            chunk[0] = 1
        assert reader.dequeue(PATIENCE) == 1
        assert not said_of_nobody(caplog)
        reader.close()
