"""The end of a relay, of its ring and of its writer: no message is lost, and no word is wrong."""

import logging
import threading
from contextlib import ExitStack
from typing import Any

import pytest

from memlane import (
    MessageQueue,
    ReaderDied,
    ShmExhausted,
    TimedOut,
    WriterClosed,
    WriterUnreachable,
)
from memlane.broadcast.network import relay, shared_reader
from memlane.broadcast.network.reader import NetworkReader
from tests.support import PATIENCE, Aside, until
from tests.support.queues import refuses
from tests.support.remote_queues import LIVENESS, relayed_queue, remote_writer


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on relays have no memory for a message."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(relay.Relay, "_put", fail)


def test_no_ring_while_the_writer_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that came before the reader knew that it has no relay are not lost."""
    with remote_writer(2, relay=True) as writer, ExitStack() as stack:
        for number in range(3):
            writer.enqueue(number)
        writer.release_reader(1)
        handle = writer.export_handle(0)
        closing = Aside(writer.close)

        def late(stream: NetworkReader, *_: object) -> None:
            until(lambda: stream.session.is_ended)
            raise ShmExhausted(28, 1 << 30, 0)

        monkeypatch.setattr(shared_reader, "Relay", late)
        reader = MessageQueue.create_from_handle(handle, 0)
        stack.callback(reader.close)
        assert list(reader) == [0, 1, 2]
        closing.result()


def test_relay_that_fails_while_its_neighbour_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The neighbour's thread asks for a stream, so the writer may close; nothing comes twice."""
    with relayed_queue(3) as (writer, readers):
        for number in range(3):
            writer.enqueue(number)
        assert [reader.dequeue(PATIENCE) for reader in readers] == [0, 0, 0]
        broken(monkeypatch)
        for number in range(3, 6):
            writer.enqueue(number)
        writer.close()
        for reader in readers:
            assert list(reader) == [1, 2, 3, 4, 5]


def test_what_is_read_after_the_end_of_a_relay_is_acknowledged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A reader that takes what is left in the ring, and no more, keeps the writer from nothing."""
    with relayed_queue(2, remote_window=3, remote_liveness=LIVENESS) as (writer, readers):
        for number in range(3):
            writer.enqueue(number)
        until(lambda: readers[1].statistics().readers[0].behind == 3)
        readers[0]._end.abandon()
        with refuses(ReaderDied):
            writer.enqueue("never sent", PATIENCE)
        writer.release_reader(0)
        assert [readers[1].dequeue(PATIENCE) for _ in range(3)] == [0, 1, 2]
        writer.enqueue(3, PATIENCE)
        assert readers[1].dequeue(PATIENCE) == 3


def test_what_a_reader_has_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its statistics go on where its ring ends."""
    with relayed_queue(2) as (writer, readers):
        writer.enqueue(bytes(1000))
        for reader in readers:
            reader.dequeue(PATIENCE)
        before = readers[0].statistics().bytes
        broken(monkeypatch)
        writer.enqueue(bytes(1000))
        for reader in readers:
            reader.dequeue(PATIENCE)
            seen = reader.statistics()
            assert (seen.messages, seen.bytes) == (2, 2 * before)


def test_dropped_while_it_waits_for_space(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The relay's thread, which reports meanwhile, ends without a word in the log."""
    caplog.set_level(logging.ERROR)
    report, abandon = relay.Relay._report, relay.Relay.abandon
    reports: list[relay.Relay] = []
    uncaught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    def reporting(self: relay.Relay) -> None:
        reports.append(self)
        if self.stream._closed:
            raise OSError("as libzmq says of a socket that is being closed")
        report(self)

    def late(self: relay.Relay) -> None:
        before = len(reports)
        if threading.current_thread() is not self._thread:
            until(lambda: len(reports) > before + 1 or not self._thread.is_alive())
        abandon(self)

    with relayed_queue(2) as (writer, readers):
        monkeypatch.setattr(relay.Relay, "_report", reporting)
        monkeypatch.setattr(relay.Relay, "abandon", late)
        for number in range(6):  # two more than the ring has chunks
            writer.enqueue(number)
        readers[0]._end.abandon()
        until(lambda: not readers[0]._reader._relay._thread.is_alive())  # type: ignore[union-attr]
    assert not caplog.records
    assert not uncaught


def test_writer_that_closes_while_a_neighbour_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, and told that nobody is there any more, not that the writer died."""
    attach_at = NetworkReader.attach_at
    with remote_writer(2, relay=True) as writer, ExitStack() as stack:
        first = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        stack.callback(first.close)
        handle = writer.export_handle(1)
        writer.enqueue("sent")

        def late(self: NetworkReader, *where: Any) -> bool:
            with refuses(TimedOut, match="reader 1"):
                writer.close(timeout=0.2)
            return attach_at(self, *where)

        monkeypatch.setattr(NetworkReader, "attach_at", late)
        with refuses(WriterUnreachable):
            MessageQueue.create_from_handle(handle, 1)
        assert list(first) == ["sent"]


def test_writer_that_closes_before_all_is_read() -> None:
    """A reader that waits for others is not told that it has read everything."""
    with remote_writer(2, remote_liveness=LIVENESS) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        writer.enqueue("unread")
        closing = Aside(writer.close)
        until(lambda: reader._reader.session.is_ended)  # type: ignore[union-attr]
        with refuses(WriterClosed) as told:
            reader.wait_until_ready(PATIENCE)
        assert "read" not in str(told.value)
        assert list(reader) == ["unread"]
        reader.close()
        with refuses(TimedOut, match=r"but reader 1 \(never attached\) did not"):
            closing.result()
