"""statistics(): the current facts about both ends."""

import dataclasses
import os
import signal
import threading
import time

import pytest

from memlane import MessageQueue, TimedOut, ViewInUse
from memlane._base.diagnosis import participant
from tests.support import Aside, until
from tests.support.queues import fill, queue_of, reader_of, ring_in

pytestmark = pytest.mark.unit


def test_a_snapshot_cannot_be_changed() -> None:
    """A snapshot does not change, and cannot be changed."""
    with queue_of(2) as (writer, readers):
        for end in (writer, *readers):
            facts = end.statistics()
            assert dataclasses.is_dataclass(facts)
            with pytest.raises(dataclasses.FrozenInstanceError):
                facts.messages = 7  # type: ignore[misc]
            assert isinstance(facts.readers, tuple)
            assert hash(facts) == hash(facts)
        before = writer.statistics()
        copied = dataclasses.asdict(before)
        writer.enqueue(1)
        assert dataclasses.asdict(before) == copied


def test_statistics_name_this_end_and_all_readers() -> None:
    """Role, rank and pid of this end, and of all readers."""
    with MessageQueue(2, 2, [5, 3], 64, 2) as writer:
        readers = [MessageQueue.create_from_handle(writer.export_handle(r), r) for r in (5, 3)]
        assert writer.statistics().role == "writer"
        assert writer.statistics().pid == os.getpid()
        for rank, reader in zip((5, 3), readers, strict=True):
            facts = reader.statistics()
            assert (facts.role, facts.rank, facts.pid) == ("reader", rank, os.getpid())
        for end in (writer, *readers):
            entries = end.statistics().readers
            assert [(entry.rank, entry.pid) for entry in entries] == [
                (5, os.getpid()),
                (3, os.getpid()),
            ]
        for reader in readers:
            reader.close()


def test_messages_and_bytes_are_counted() -> None:
    """Messages and bytes count what was sent, and what was read."""
    with queue_of(2, max_chunk_bytes=4096) as (writer, (one, other)):
        for _ in range(4):
            writer.enqueue(bytes(1000))
        for _ in range(3):
            one.dequeue()
        counts = [end.statistics().messages for end in (writer, one, other)]
        assert counts == [4, 3, 0]
        amounts = [end.statistics().bytes for end in (writer, one, other)]
        assert 4000 <= amounts[0] <= 4 * 4096
        assert 3000 <= amounts[1] <= 3 * 4096
        assert amounts[2] == 0


def test_every_end_sees_each_readers_lag() -> None:
    """Every reader's lag in messages, seen from every end, over several laps."""
    with queue_of(2, max_chunks=3) as (writer, (one, other)):
        for _ in range(5):
            for _ in range(3):
                writer.enqueue(1)
            assert [entry.behind for entry in writer.statistics().readers] == [3, 3]
            one.dequeue()
            assert [entry.behind for entry in other.statistics().readers] == [2, 3]
            for reader, rest in ((one, 2), (other, 3)):
                for _ in range(rest):
                    reader.dequeue()
            assert [entry.behind for entry in one.statistics().readers] == [0, 0]


def test_what_fails_is_not_counted_as_sent() -> None:
    """Timeouts of small and large messages do not change the counts."""
    with queue_of(max_chunks=2) as (writer, _):
        count = fill(writer)
        with pytest.raises(TimedOut):
            writer.enqueue(bytes(5000), timeout=0)
        assert (writer.statistics().messages, writer.statistics().spills) == (count, 0)


def test_calls_that_had_to_wait_are_counted() -> None:
    """A call that had to wait is counted, others are not."""
    with queue_of(max_chunks=1) as (writer, (reader,)):
        writer.enqueue(0)
        reader.dequeue()
        assert (writer.statistics().waits, reader.statistics().waits) == (0, 0)
        read = Aside(reader.dequeue).until_blocked()
        writer.enqueue(1)
        read.result()
        writer.enqueue(2)
        write = Aside(writer.enqueue, 3).until_blocked()
        reader.dequeue()
        write.result()
        assert (writer.statistics().waits, reader.statistics().waits) == (1, 1)


def test_a_reader_that_closed_is_seen_as_closed() -> None:
    """closed is neither absent nor dead, seen from any end."""
    with queue_of(2) as (writer, (stays, leaves)):
        leaves.close()
        assert [entry.state for entry in writer.statistics().readers] == ["running", "closed"]
        assert [entry.state for entry in stays.statistics().readers] == ["running", "closed"]


def test_last_progress_moves_on() -> None:
    """Reading is progress. Its clock ticks every 1 to 10 ms."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(1)
        writer.enqueue(2)
        reader.dequeue()
        first = reader_of(writer, 0).last_progress
        assert first is not None
        time.sleep(0.02)
        reader.dequeue()
        assert reader_of(writer, 0).last_progress != first


def test_while_a_call_is_blocked() -> None:
    """Another process can take statistics while an end waits."""
    with queue_of(max_chunks=2) as (writer, (reader,)):
        fill(writer)
        write = Aside(writer.enqueue, "late").until_blocked()
        assert reader_of(reader, 0).behind == 2
        reader.dequeue()
        write.result()


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_a_call_that_a_handler_ended_no_longer_counts_as_waiting(role: str) -> None:
    """It no longer counts as waiting, though it ended by an exception."""

    def interrupt(*_: object) -> None:
        raise ZeroDivisionError

    with queue_of(max_chunks=1) as (writer, (reader,)):
        writer.enqueue("full")
        if role == "reader":
            reader.dequeue()
        previous = signal.signal(signal.SIGUSR1, interrupt)
        try:
            end = reader if role == "reader" else writer
            Aside(signal_when_waiting, end, end.statistics().waits)
            with pytest.raises(ZeroDivisionError):
                _ = reader.dequeue() if role == "reader" else writer.enqueue("no room")
        finally:
            signal.signal(signal.SIGUSR1, previous)
        native = reader._reader.native
        assert {participant(native, slot).slot.activity for slot in (0, 1)} == {"elsewhere"}


def signal_when_waiting(end: MessageQueue, waits: int) -> None:
    until(lambda: end.statistics().waits > waits)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)


def test_a_reader_that_closed_has_no_views() -> None:
    """It is not waited for any more, so its views are 0."""
    with queue_of(max_chunk_bytes=1 << 16) as (writer, (reader,)):
        writer.enqueue(bytearray(5000))
        with pytest.raises(ViewInUse), reader.acquire_read() as view:
            kept = view[1:]
        assert reader_of(writer, 0).views == 1
        reader.close()
        assert (reader_of(writer, 0).views, reader_of(writer, 0).views_since) == (0, None)
        del kept


def test_repr_shows_the_facts() -> None:
    """The repr is readable."""
    with queue_of() as (writer, (reader,)):
        assert "writer" in repr(writer.statistics())
        assert "running" in repr(reader.statistics())


def test_the_repr_of_a_queue_names_role_and_segment() -> None:
    """The repr of an end has class, role, and the segment, even after close."""
    with queue_of() as (writer, (reader,)):
        for end, role in ((writer, "writer"), (reader, "reader")):
            text = repr(end)
            assert "MessageQueue" in text
            assert role in text.lower()
            assert ring_in(writer).shared_memory.name.removeprefix("memlane-")[:8] in text
        writer.close()
        reader.close()
        assert "closed" in repr(writer)
        assert "closed" in repr(reader)
