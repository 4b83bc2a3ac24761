"""MessageQueue over the network keeps the promises of a local queue."""

import dataclasses
import threading
import time
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from memlane import (
    Cancelled,
    Closed,
    ConcurrentUse,
    CorruptMessage,
    InvalidArgument,
    InvalidType,
    MessageQueue,
    RankTaken,
    TimedOut,
    Unsupported,
    WrongRole,
)
from memlane.broadcast.protocol import message
from memlane.broadcast.protocol.frames import PIECE, SMALL
from memlane.testing import stalls
from tests.support import PATIENCE, Aside, until
from tests.support.queues import drain, fill, refuses, start_reader
from tests.support.remote_queues import HERE, remote_queue, remote_writer, start_remote_reader


def test_attributes_have_their_documented_values() -> None:
    """The documented attributes, on every kind of end."""
    with remote_queue() as (writer, (reader,)):
        for end in (writer, reader):
            assert (end.n_local_reader, end.n_remote_reader) == (0, 1)
            assert (end.buffer, end.current_idx, end.local_reader_rank) == (None, -1, -1)
            assert end.local_socket is None
            assert end.remote_socket is not None
        assert (reader._is_writer, reader._is_local_reader, reader._is_remote_reader) == (
            False,
            False,
            True,
        )
        assert (writer._is_writer, writer._is_remote_reader) == (True, False)
        assert "reader 0" in repr(reader)


OBJECTS: dict[str, Any] = {
    "dict": {"step": 7, "text": "ä", "floats": [0.5, None, True]},
    "tuple": ((1, 2), {"set": {3}}),
    "empty bytes": b"",
    "bytes": b"x" * 100_000,
    "bytes of many pieces": bytes(range(256)) * 4000,
    "just a piece": b"y" * PIECE,
    "a byte more": b"y" * (PIECE + 1),
    "just small": b"s" * SMALL,
    "large bytes in a dict": {"data": b"z" * 300_000},
    "array": np.arange(200_000, dtype=np.float64),
    "arrays": [np.ones((3, 5000), np.int16), "between", np.zeros(4096, np.uint8)],
    "stream and array": {"stream": ["s" * 300] * 900, "array": np.arange(10_000)},
}


@pytest.mark.parametrize("obj", OBJECTS.values(), ids=OBJECTS.keys())
def test_any_picklable_object_arrives_as_it_was(obj: Any) -> None:
    """Any picklable object of any size arrives as it was, to several readers."""
    with remote_queue(2) as (writer, readers):
        writer.enqueue(obj)
        for reader in readers:
            np.testing.assert_equal(reader.dequeue(PATIENCE), obj)


def test_what_arrives_is_the_readers_own() -> None:
    """Writable, and independent of the caller's changes after enqueue (M20)."""
    with remote_queue(2) as (writer, readers):
        array = np.arange(100_000)
        writer.enqueue(array)
        array[:] = -1
        for reader in readers:
            got = reader.dequeue(PATIENCE)
            assert (got == np.arange(100_000)).all()
            got[:] = 0


@pytest.mark.parametrize("relay", [False, True])
def test_arrays_of_any_size_are_writable(relay: bool) -> None:
    with remote_queue(2, relay=relay) as (writer, readers):
        for nbytes in (1, 4096, 8000, SMALL // 2, SMALL - 300, SMALL, PIECE, PIECE + 1):
            writer.enqueue({"array": np.full(nbytes, 1, np.uint8)}, PATIENCE)
            for reader in readers:
                got = reader.dequeue(PATIENCE)["array"]
                got += 1
                assert (got == 2).all(), nbytes


def test_messages_before_anybody_is_there() -> None:
    """A reader that attaches late gets every message from the first."""
    with remote_writer(2) as writer:
        for number in range(100):
            writer.enqueue(number)
        for rank in range(2):
            with MessageQueue.create_from_handle(writer.export_handle(), rank) as reader:
                assert [reader.dequeue(PATIENCE) for _ in range(100)] == list(range(100))


def test_enqueue_waits_for_a_full_window() -> None:
    """enqueue waits for the slowest reader, names it, and after a timeout has sent nothing."""
    with remote_queue(2, remote_window=10) as (writer, (fast, slow)):
        assert fill(writer) == 10
        assert [fast.dequeue(PATIENCE) for _ in range(10)] == list(range(10))
        with refuses(TimeoutError, TimedOut) as caught:
            writer.enqueue("too late", timeout=0.05)
        for fact in ("reader 1", HERE, "10 behind", "0.05 s"):
            assert fact in str(caught.value)
        assert "reader 0" not in str(caught.value)
        waits = Aside(writer.enqueue, 10).until_blocked()
        assert slow.dequeue(PATIENCE) == 0
        assert slow.dequeue(PATIENCE) == 1
        waits.result()
        assert fast.dequeue(PATIENCE) == 10
        assert [slow.dequeue(PATIENCE) for _ in range(9)] == list(range(2, 11))


def test_a_message_larger_than_the_window_is_sent_by_itself() -> None:
    """A message larger than the window is sent alone."""
    with remote_queue(remote_window_bytes=100_000) as (writer, (reader,)):
        writer.enqueue(b"a" * 60_000)
        with refuses(TimeoutError):
            writer.enqueue(b"b" * 60_000, timeout=0)
        assert reader.dequeue(PATIENCE) == b"a" * 60_000
        writer.enqueue(b"c" * 1_000_000, timeout=PATIENCE)
        with refuses(TimeoutError):
            writer.enqueue(b"", timeout=0)
        assert len(reader.dequeue(PATIENCE)) == 1_000_000


def test_the_warning_names_the_culprit() -> None:
    """Rank, address, pid and lag come first; then the words that users search for."""
    with remote_queue(remote_window=1) as (writer, (reader,)):
        writer.enqueue(1)
        with stalls(0.15) as lines, refuses(TimeoutError):
            writer.enqueue(2, timeout=0.4)
        assert lines
        assert "; waiting for reader 0 (pid " in lines[0]
        assert f"at {HERE}:" in lines[0]
        assert "1 behind" in lines[0]
        assert "No available shared memory broadcast block" in lines[0]
        reader.dequeue()


def test_timeouts_consume_nothing() -> None:
    """A reader that polls while large messages arrive gets them whole, in order (M2)."""
    with remote_queue() as (writer, (reader,)):
        for number in range(5):
            writer.enqueue(bytes([number]) * 2_000_000)
        got: list[int] = []
        deadline = time.monotonic() + PATIENCE
        while len(got) < 5 and time.monotonic() < deadline:
            try:
                message = reader.dequeue(timeout=0)
            except TimeoutError:
                continue
            assert len(message) == 2_000_000
            got.append(message[0])
        assert got == list(range(5))


def test_a_message_wins_over_cancel_and_cancel_over_the_timeout() -> None:
    """An available message wins, then cancel, then the timeout."""
    with remote_queue() as (writer, (reader,)):
        cancel = threading.Event()
        waits = Aside(reader.dequeue, None, cancel).until_blocked()
        cancel.set()
        with pytest.raises(Cancelled):
            waits.result()
        with pytest.raises(Cancelled):
            reader.dequeue(0, cancel)
        writer.enqueue("there")
        until(lambda: drain_one(reader, cancel) == "there")
        with refuses(TypeError):
            reader.dequeue(0, cancel=7)  # type: ignore[arg-type]


def drain_one(reader: MessageQueue, cancel: threading.Event) -> object:
    try:
        return reader.dequeue(0, cancel)
    except Cancelled:
        return None


@pytest.mark.parametrize("timeout", [float("nan"), "1", [], 1j])
def test_timeouts_that_are_none(timeout: Any) -> None:
    """They are refused by both ends, as on one host."""
    with remote_queue() as (writer, (reader,)):
        for call in (lambda: writer.enqueue(1, timeout), lambda: reader.dequeue(timeout)):
            with refuses(TypeError, ValueError):
                call()
        with refuses(TimeoutError):
            reader.dequeue(-1)


def test_errors_name_the_role_that_may_call() -> None:
    """The error names the role that may make the call."""
    with remote_queue() as (writer, (reader,)):
        with refuses(WrongRole, match="Only readers can dequeue"):
            writer.dequeue()
        for call in (
            lambda: reader.enqueue(1),
            lambda: reader.acquire_write(),
            lambda: reader.release_reader(0),
            lambda: reader.export_handle(),
        ):
            with refuses(WrongRole, match="Only the writer can"):
                call()
        with refuses(WrongRole, match="Only local readers can acquire_read"), reader.acquire_read():
            pass


def test_a_chunk_filled_by_hand_is_corrupt_to_remote_readers() -> None:
    """It is CorruptMessage to a remote reader, and the next message comes through."""
    with remote_queue(1, 1) as (writer, readers):
        with writer.acquire_write(PATIENCE) as chunk:
            chunk[:3] = b"raw"
        with pytest.raises(ZeroDivisionError), writer.acquire_write(PATIENCE):
            raise ZeroDivisionError
        writer.enqueue("next")
        for reader in readers:
            with refuses(CorruptMessage):
                reader.dequeue(PATIENCE)
            assert reader.dequeue(PATIENCE) == "next"


def test_a_chunk_that_nobody_could_read_is_refused() -> None:
    """With all readers on other hosts the writer is refused, and nothing is sent."""
    with remote_queue() as (writer, (reader,)):
        with refuses(Unsupported, match="use enqueue"), writer.acquire_write(PATIENCE):
            pass
        writer.enqueue("next")
        assert reader.dequeue(PATIENCE) == "next"


class Bomb:
    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_decoding_that_raises() -> None:
    """That one dequeue raises, the message is consumed (M3)."""
    with remote_queue() as (writer, (reader,)):
        writer.enqueue(Bomb())
        writer.enqueue(1)
        with pytest.raises(ZeroDivisionError):
            reader.dequeue(PATIENCE)
        assert reader.dequeue(PATIENCE) == 1


def test_encoding_that_raises() -> None:
    """Nothing was sent."""
    with remote_queue() as (writer, (reader,)):
        with refuses(InvalidType):
            writer.enqueue([lambda: 1])
        writer.enqueue("after")
        assert reader.dequeue(PATIENCE) == "after"


def test_readers_learn_the_serializer_from_the_handle() -> None:
    """Readers learn the serializer from the handle."""
    with remote_queue(serializer="msgpack") as (writer, (reader,)):
        writer.enqueue({"a": (1, 2)})
        assert reader.dequeue(PATIENCE) == {"a": [1, 2]}
        with refuses(TypeError):
            writer.enqueue(Bomb())


def test_a_second_call_at_a_time_is_refused() -> None:
    """A second one raises ConcurrentUse and changes nothing."""
    with remote_queue(remote_window=1) as (writer, (reader,)):
        reads = Aside(reader.dequeue).until_blocked()
        with refuses(ConcurrentUse):
            reader.dequeue(0)
        writer.enqueue(1)
        assert reads.result() == 1
        writer.enqueue(2, PATIENCE)
        writes = Aside(writer.enqueue, 3).until_blocked()
        with refuses(ConcurrentUse):
            writer.enqueue(4, 0)
        assert [reader.dequeue(PATIENCE) for _ in range(2)] == [2, 3]
        writes.result()


def test_iteration_gets_all_that_is_queued_at_the_close(method: str) -> None:
    """Readers in other processes get what is queued, large or small; then it ends."""
    with remote_writer(2) as writer:
        remotes = [start_remote_reader(writer, rank, method) for rank in range(2)]
        for number in range(20):
            writer.enqueue(bytes([number]) * 500_000)
        writer.close()
        for remote in remotes:
            assert remote.call(first_bytes) == list(range(20))
            with refuses(Closed):
                remote.call("dequeue")
            remote.call("close")
        with refuses(Closed):
            writer.enqueue(1)


def first_bytes(queue: MessageQueue) -> list[int]:
    return [message[0] for message in queue]


def test_close_wakes_blocked_calls() -> None:
    """They raise Closed; a second close does nothing."""
    with remote_queue(remote_window=1) as (writer, (reader,)):
        reads = Aside(reader.dequeue).until_blocked()
        reader.close()
        with refuses(Closed):
            reads.result()
        reader.close()
        with refuses(Closed):
            reader.statistics()
    with remote_queue(remote_window=1) as (writer, (reader,)):
        writer.enqueue(1)
        writes = Aside(writer.enqueue, 2).until_blocked()
        writer.close()
        with refuses(Closed):
            writes.result()
        assert reader.dequeue(PATIENCE) == 1
        with refuses(Closed):
            reader.dequeue(PATIENCE)


def test_nobody_waits_for_a_reader_that_closed() -> None:
    """Its unread messages are released, and a blocked writer continues."""
    with remote_queue(2, remote_window=2) as (writer, (stays, leaves)):
        assert fill(writer) == 2
        assert [stays.dequeue(PATIENCE) for _ in range(2)] == [0, 1]
        writes = Aside(writer.enqueue, 2).until_blocked()
        leaves.close()
        writes.result()
        assert stays.dequeue(PATIENCE) == 2
        assert [row.state for row in writer.statistics().readers] == ["running", "closed"]


def test_statistics_have_a_row_for_each_remote_reader() -> None:
    """A row for each remote reader: where, in what state, how far behind."""
    with remote_queue(2) as (writer, (first, _)):
        for number in range(3):
            writer.enqueue(number)
        assert [first.dequeue(PATIENCE) for _ in range(3)] == [0, 1, 2]
        with refuses(TimeoutError):  # an acknowledgement may wait for company
            first.dequeue(timeout=0.1)
        until(lambda: [row.behind for row in writer.statistics().readers] == [0, 3])
        seen = writer.statistics()
        assert (seen.role, seen.messages) == ("writer", 3)
        for rank, row in enumerate(seen.readers):
            assert (row.rank, row.state) == (rank, "running")
            assert row.address is not None
            assert row.address.startswith(f"{HERE}:")
            assert row.last_progress is not None
        own = first.statistics()
        assert (own.role, own.rank, own.messages) == ("reader", 0, 3)


def test_one_enqueue_serves_local_and_remote_readers() -> None:
    """One enqueue serves both; a timeout of either leaves nothing half sent."""
    with remote_queue(1, 1, remote_window=6) as (writer, (local, remote)):
        assert fill(writer) == 4  # the ring is the narrower one
        assert drain(local) == [0, 1, 2, 3]
        writer.enqueue(4)
        writer.enqueue(5)
        with refuses(TimeoutError, match="reader 1"):  # now the window is
            writer.enqueue("too late", timeout=0.05)
        assert [remote.dequeue(PATIENCE) for _ in range(6)] == list(range(6))
        big = np.arange(50_000)
        writer.enqueue(big, PATIENCE)
        assert drain(local)[:2] == [4, 5]
        assert (remote.dequeue(PATIENCE) == big).all()
        assert [row.rank for row in writer.statistics().readers] == [0, 1]
        assert writer.current_idx == 7 % 4


def test_ready_waits_for_everybody() -> None:
    """Local and remote; missing readers are named. The others need not call it."""
    with remote_writer(2, 1) as writer:
        local = MessageQueue.create_from_handle(writer.export_handle(), 0)
        remote = MessageQueue.create_from_handle(writer.export_handle(), 1)
        with refuses(TimeoutError, match="reader 2"):
            writer.wait_until_ready(0.2)
        with refuses(TimeoutError, match="reader 2"):
            remote.wait_until_ready(3)  # until then the writer's thread has answered
        with refuses(TimeoutError, match="1 readers on other hosts"):
            local.wait_until_ready(0.2)
        waits = [Aside(end.wait_until_ready, PATIENCE) for end in (local, remote)]
        late = MessageQueue.create_from_handle(writer.export_handle(), 2)
        for wait in waits:
            wait.result()
        late.wait_until_ready(PATIENCE)
        writer.wait_until_ready(PATIENCE)
        for end in (local, remote, late):
            end.close()


def test_an_absent_remote_reader_can_be_released() -> None:
    """The queue continues without it, and it can never attach; a live one is refused."""
    with remote_writer(2, remote_window=1) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        handle = writer.export_handle(1)
        with refuses(ValueError, match="connected"):
            writer.release_reader(0)
        with refuses(ValueError):
            writer.release_reader(9)
        writer.release_reader(1)
        for number in range(5):
            writer.enqueue(number, PATIENCE)
            assert reader.dequeue(PATIENCE) == number
        with refuses(ValueError):
            MessageQueue.create_from_handle(handle, 1)
        writer.wait_until_ready(PATIENCE)
        reader.close()


def test_places_that_are_all_taken() -> None:
    """The error names the ranks that have them, on both sides."""
    with remote_writer(2) as writer:
        writer.export_handle(7)
        handle = writer.export_handle()
        reader = MessageQueue.create_from_handle(handle, 0)
        owners = r"reader 0 \(running\), reader 7 \(never attached\)"
        with refuses(RankTaken, match=owners):
            MessageQueue.create_from_handle(handle, 1)
        with refuses(InvalidArgument, match=owners):
            writer.export_handle(1)
        reader.close()


@pytest.mark.parametrize("is_exported", [True, False])
def test_a_released_place_is_closed(is_exported: bool) -> None:
    """Nobody waits for it, and neither its own rank nor another gets it, before `readmit`."""
    with remote_writer(2) as writer:
        handle = writer.export_handle(7 if is_exported else None)
        first = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        writer.release_reader(7 if is_exported else 1)
        writer.release_reader(7 if is_exported else 1)
        writer.wait_until_ready(PATIENCE)
        writer.enqueue("first")
        rank = 7 if is_exported else 1
        with refuses(RankTaken, match=f"reader {rank} was released"):
            MessageQueue.create_from_handle(handle, rank)
        with refuses(InvalidArgument, match=rf"reader {rank} \(released\)"):
            writer.export_handle(2)
        with refuses(RankTaken):
            MessageQueue.create_from_handle(dataclasses.replace(handle, rank=None), 2)
        with MessageQueue.create_from_handle(writer.readmit(rank), rank) as second:
            writer.enqueue("second")
            assert second.dequeue(PATIENCE) == "second"
        assert [first.dequeue(PATIENCE) for _ in range(2)] == ["first", "second"]
        first.close()


def test_a_released_reader_takes_no_other_place() -> None:
    """The other places are for those that the writer waits for."""
    with remote_writer(3) as writer:
        handle = writer.export_handle()
        writer.release_reader(1)
        writer.enqueue("first")
        with refuses(RankTaken, match="reader 1 was released before it attached"):
            MessageQueue.create_from_handle(handle, 1)
        readers = [MessageQueue.create_from_handle(handle, rank) for rank in (0, 2)]
        writer.wait_until_ready(PATIENCE)
        assert [reader.dequeue(PATIENCE) for reader in readers] == ["first"] * len(readers)
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("local", [0, 1])
def test_ready_though_the_writer_has_closed(local: int) -> None:
    """A writer that has found everybody there may close at once: its readers are told before.

    Fails without the guard: the thread that would have told them had ended.
    """
    with remote_writer(1, local) as writer:
        beside = start_reader(writer.export_handle(0), 0) if local else None
        handle = writer.export_handle(local)

        def write() -> None:
            writer.wait_until_ready(PATIENCE)
            for number in range(3):
                writer.enqueue(number)
            writer.close()

        writing = Aside(write).until_blocked()
        reader = start_reader(handle, local)
        writing.result()
        reader.call("wait_until_ready", PATIENCE)
        assert [reader.call("dequeue", PATIENCE) for _ in range(3)] == [0, 1, 2]
    reader.leave()
    if beside is not None:
        beside.leave()


def test_a_message_without_memory_is_not_consumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that finds no memory is not consumed, whoever finds that: a call or the thread."""
    with remote_queue() as (writer, (reader,)):
        attempts: list[int] = []

        def fail(size: int) -> bytes:
            attempts.append(size)
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(message, "pooled", fail)
            writer.enqueue(np.arange(1 << 18))
            until(lambda: bool(attempts))
            time.sleep(1.2)  # a wait for what must not happen
            assert len(attempts) == 1  # not again and again, with all that was sent
            with pytest.raises(MemoryError):
                reader.dequeue(PATIENCE)
        assert (reader.dequeue(PATIENCE) == np.arange(1 << 18)).all()
        writer.enqueue("next")
        assert reader.dequeue(PATIENCE) == "next"


@pytest.mark.parametrize("size", [10, 2 << 20], ids=["whole", "in pieces"])
def test_an_inbox_without_memory_loses_nothing(size: int) -> None:
    """Not even then is a message lost."""

    class Inbox(deque[message.Message]):
        is_full = True

        def append(self, item: message.Message) -> None:
            if self.is_full:
                self.is_full = False
                raise MemoryError
            super().append(item)

    with remote_queue() as (writer, (reader,)):
        reader._reader.session.inbox = Inbox()  # type: ignore[union-attr]
        for sent in (bytes(size), b"next"):
            writer.enqueue(sent)
        with suppress(MemoryError):  # which the thread may meet instead
            assert reader.dequeue(PATIENCE) == bytes(size)
            assert reader.dequeue(PATIENCE) == b"next"
            return
        assert [reader.dequeue(PATIENCE) for _ in range(2)] == [bytes(size), b"next"]
