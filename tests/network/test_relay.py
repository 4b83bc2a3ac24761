"""Readers on one remote host, one of which receives for all."""

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from threading import Event
from typing import Any

import numpy as np
import pytest

from memlane import (
    CorruptMessage,
    MessageQueue,
    RankTaken,
    ReaderDied,
    ReaderGivenUp,
    TimedOut,
    WriterClosed,
    WrongRole,
)
from memlane.broadcast import grouping
from memlane.broadcast.network import relay, shared_reader
from memlane.broadcast.network.reader import NetworkReader
from memlane.broadcast.protocol import frames as wire
from memlane.broadcast.protocol.frames import ReportRow
from memlane.broadcast.protocol.message import Message
from tests.support import (
    PATIENCE,
    Aside,
    Link,
    idle_share,
    private_shm,
    start,
    unshare_refusal,
    until,
)
from tests.support.groups import groups_of, queues_over
from tests.support.proxies import Cable
from tests.support.queues import SHM, refuses, segments
from tests.support.remote_queues import (
    LIVENESS,
    bytes_sent,
    connections_of,
    relayed_queue,
    remote_queue,
    remote_writer,
)

LARGE = np.arange(300_000, dtype=np.int32)
MESSAGES: list[Any] = [
    None,
    {"plain": [1, 2.5, "text"]},
    b"bytes",
    b"many bytes" * 10_000,
    (1, {2}, complex(3, 4)),
    ["text" * 30_000, {1, 2}],
    LARGE,
    {"a": LARGE[:2000].copy(), "b": LARGE[::2].copy(), "c": {3}},
    MessageQueue,
]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other) and type(one) is type(other)


def test_objects_of_every_kind_pass_the_relay() -> None:
    """Every kind of message, small and larger than a chunk, arrives as it was sent, everywhere."""

    def read(reader: MessageQueue) -> list[Any]:
        return [reader.dequeue(PATIENCE) for _ in MESSAGES]

    with relayed_queue() as (writer, readers):
        reading = [Aside(read, reader) for reader in readers]
        for message in MESSAGES:
            writer.enqueue(message, PATIENCE)
        for each in reading:
            assert all(map(same, MESSAGES, each.result()))


def test_nothing_is_decoded_on_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code in a message is executed in the readers only, once in each."""
    with relayed_queue(2) as (writer, readers):
        writer.enqueue(Counted())
        until(lambda: writer.statistics().readers[0].behind == 1)
        ring = readers[0]._reader._relay.ring  # type: ignore[union-attr]
        until(lambda: ring.native.position == 1, "it is in the ring")
        assert Counted.made == 0
        for reader in readers:
            reader.dequeue(PATIENCE)
        assert Counted.made == 2


class Counted:
    made = 0

    def __reduce__(self) -> Any:
        return _count, ()


def _count() -> None:
    Counted.made += 1


def test_one_stream_serves_eight_readers() -> None:
    """Bytes on the wire for 8 readers behind a relay: at most 1.05 of those for one reader."""
    payload = bytes(100_000)

    def cost(queue: Any) -> int:
        with queue as (writer, readers):
            before = bytes_sent(writer)
            for _ in range(20):
                writer.enqueue(payload, PATIENCE)
                for reader in readers:
                    assert reader.dequeue(PATIENCE) == payload
            until(lambda: bytes_sent(writer) - before >= 20 * len(payload))
            return bytes_sent(writer) - before

    one, eight = cost(remote_queue(1)), cost(relayed_queue(8))
    assert one >= 20 * len(payload)
    assert eight <= 1.05 * one


@pytest.mark.parametrize("slow", [0, 2])
def test_lag_is_seen(slow: int) -> None:
    """The writer waits for the slowest reader behind the relay, and names it."""
    with relayed_queue(3, remote_window=4) as (writer, readers):
        for number in range(4):
            writer.enqueue(number, PATIENCE)
        for rank in {0, 1, 2} - {slow}:
            assert [readers[rank].dequeue(PATIENCE) for _ in range(4)] == [0, 1, 2, 3]
        behind = [4 if rank == slow else 0 for rank in range(3)]
        until(lambda: [row.behind for row in writer.statistics().readers] == behind)
        with refuses(TimeoutError, match=rf"reader {slow} \(pid \d+ at .*, 4 behind"):
            writer.enqueue("too much", 0.1)
        assert readers[slow].dequeue(PATIENCE) == 0
        writer.enqueue("enough", PATIENCE)
        assert [readers[slow].dequeue(PATIENCE) for _ in range(4)] == [1, 2, 3, "enough"]


def test_nothing_is_lost_when_ring_and_window_are_full() -> None:
    """Nothing is lost, repeated or out of order when everything is full."""
    count = 500

    def read(reader: MessageQueue) -> list[int]:
        return [reader.dequeue(PATIENCE) for _ in range(count)]

    with relayed_queue(3, remote_window=8) as (writer, readers):
        reading = [Aside(read, reader) for reader in readers]
        for number in range(count):
            writer.enqueue(number, PATIENCE)
        for each in reading:
            assert each.result() == list(range(count))
        until(lambda: not any(row.behind for row in writer.statistics().readers))


def test_writer_closes() -> None:
    """Every reader gets all messages, then the end."""
    with relayed_queue(3) as (writer, readers):
        for number in range(10):
            writer.enqueue(number, PATIENCE)
            for reader in readers:
                assert reader.dequeue(PATIENCE) == number
        writer.enqueue("last")
        writer.close()
        for reader in readers:
            assert reader.dequeue(PATIENCE) == "last"
            with refuses(WriterClosed):
                reader.dequeue(PATIENCE)


def test_reader_closes() -> None:
    """A closed reader is not waited for, behind the relay or beside it."""
    with relayed_queue(3, remote_window=2) as (writer, readers):
        readers[1].close()
        until(lambda: writer.statistics().readers[1].state == "closed")
        for number in range(6):
            writer.enqueue(number, PATIENCE)
            assert readers[0].dequeue(PATIENCE) == number
            assert readers[2].dequeue(PATIENCE) == number
        readers[0].close()
        until(lambda: writer.statistics().readers[0].state == "closed")
        for number in range(6):
            writer.enqueue(number, PATIENCE)
            assert readers[2].dequeue(PATIENCE) == number
        readers[2].close()
        until(lambda: writer.statistics().readers[2].state == "closed")
        for number in range(6):
            writer.enqueue(number, PATIENCE)


def states(writer: MessageQueue) -> list[str]:
    return [row.state for row in writer.statistics().readers]


def test_the_last_readers_of_a_relay_are_reported_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are reported as closed, although the relay ends with them."""
    with relayed_queue(2) as (writer, readers):
        report = relay.Relay._report

        def report_and_close(self: relay.Relay) -> int:
            behind = report(self)
            if self._reader_has_left:
                readers[1].close()
            return behind

        monkeypatch.setattr(relay.Relay, "_report", report_and_close)
        readers[0].close()
        until(lambda: states(writer) == ["closed", "closed"])


def dequeue_view(reader: MessageQueue) -> Any:
    with reader.dequeue_view(PATIENCE) as message:
        return message


@pytest.mark.parametrize(
    "take", [lambda r: r.dequeue(PATIENCE), dequeue_view], ids=["copy", "view"]
)
def test_end_of_a_relay_whose_reader_had_closed(take: Any) -> None:
    """The reader behind it continues by itself, without loss."""
    with relayed_queue(2) as (writer, readers):
        readers[0].close()
        until(lambda: states(writer) == ["closed", "running"])
        writer.enqueue("in the ring")
        ring = readers[0]._reader._relay.ring  # type: ignore[union-attr]
        until(lambda: ring.native.position == 1)
        readers[0]._reader._relay.abandon()  # type: ignore[union-attr]
        writer.enqueue("behind it")
        assert [take(readers[1]) for _ in range(2)] == ["in the ring", "behind it"]
        assert states(writer) == ["closed", "running"]
        assert readers[1].statistics().messages == 2


def relay_without_space(_link: Link) -> None:
    with relayed_queue(2) as (writer, readers):
        sent = ["before", bytes(12 << 20), "after", "last"]
        for message in sent[:3]:
            writer.enqueue(message, PATIENCE)
        for reader in readers:
            assert [reader.dequeue(PATIENCE) for _ in sent[:3]] == sent[:3]
        writer.enqueue(sent[3], PATIENCE)
        assert states(writer) == ["running", "running"]
        closing = Aside(writer.close)
        for reader in readers:
            assert list(reader) == [sent[3]]
        closing.result()


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_readers_of_a_relay_without_space_go_on() -> None:
    """Every reader of that host, the relay's own included, goes on by itself, without loss."""
    start(relay_without_space, method="spawn", command=private_shm("6m")).result()


@pytest.mark.parametrize("where", ["_put", "_report", "_attend"])
@pytest.mark.parametrize("is_closed", [False, True], ids=["relay's own reader", "others only"])
def test_relay_that_fails(
    where: str, is_closed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after its death, but that its own reader goes on, too."""
    with relayed_queue(3, remote_window=4) as (writer, readers):
        if is_closed:
            readers.pop(0).close()
            until(lambda: states(writer)[0] == "closed")
        writer.enqueue(0)

        def fail(*_: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(relay.Relay, where, fail)
            writer.enqueue(1, PATIENCE)
            until(lambda: "a relay failed" in caplog.text)
        sending = Aside(lambda: [writer.enqueue(number, PATIENCE) for number in range(2, 50)])
        for reading in [
            Aside(lambda r: [r.dequeue(PATIENCE) for _ in range(50)], reader) for reader in readers
        ]:
            assert reading.result() == list(range(50))
        sending.result()
        assert set(states(writer)[is_closed:]) == {"running"}


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on relays have no memory for a message."""

    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(relay.Relay, "_put", fail)


def test_relay_that_fails_before_its_reader_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever that reader does first, it misses nothing that is still in the ring."""
    with relayed_queue(2) as (writer, readers):
        for number in range(3):
            writer.enqueue(number)
        until(lambda: readers[1].statistics().readers[0].behind == 3)
        broken(monkeypatch)
        writer.enqueue(3)
        until(lambda: readers[0]._reader._relay.has_failed)  # type: ignore[union-attr]
        readers[0].wait_until_ready(PATIENCE)
        for reader in readers:
            assert [reader.dequeue(PATIENCE) for _ in range(4)] == list(range(4))


def test_relay_that_fails_with_half_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message that it could not pass on is acknowledged once it is read, or the next would have
    no room."""
    with relayed_queue(2, remote_window_bytes=4 << 20) as (writer, readers):
        broken(monkeypatch)
        sending = Aside(lambda: [writer.enqueue(bytes(3 << 20), PATIENCE) for _ in range(3)])
        for reading in [
            Aside(lambda r: [len(r.dequeue(PATIENCE)) for _ in range(3)], reader)
            for reader in readers
        ]:
            assert reading.result() == [3 << 20] * 3
        sending.result()


def test_relay_that_fails_while_its_reader_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer knows at once, so the death of a neighbour is one, though nobody reports it."""
    with relayed_queue(2, remote_window=2, remote_liveness=LIVENESS) as (writer, readers):
        broken(monkeypatch)
        writer.enqueue(0)
        until(lambda: readers[0]._reader._relay.has_failed)  # type: ignore[union-attr]
        readers[1]._reader.abandon()  # type: ignore[union-attr]
        with refuses(ReaderDied) as death:
            for number in range(1, 4):
                writer.enqueue(number, PATIENCE)
        assert death.value.rank == 1
        assert states(writer) == ["running", "dead"]


@contextmanager
def mixed_queue() -> Iterator[tuple[MessageQueue, MessageQueue, list[MessageQueue]]]:
    """A writer, the reader on its host, and two behind a relay."""
    with remote_writer(2, 1, relay=True) as writer, ExitStack() as stack:
        readers = []
        for rank in range(3):
            readers.append(MessageQueue.create_from_handle(writer.export_handle(rank), rank))
            stack.callback(readers[-1].close)
        writer.wait_until_ready(PATIENCE)
        assert connections_of(writer) == 1
        yield writer, readers[0], readers[1:]


def test_raw_bytes_stay_on_the_writers_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers that share a ring have chunks, but what the writer filled by hand is not in them.

    Fails without the guard: a block showed what the chunk had held before.
    """
    with mixed_queue() as (writer, local, readers):
        with writer.acquire_write() as chunk:
            chunk[:3] = b"abc"
        with local.acquire_read(PATIENCE) as seen:
            assert bytes(seen[:3]) == b"abc"
        for reader in readers:
            with refuses(WrongRole), reader.acquire_read(PATIENCE):
                pass
            with refuses(CorruptMessage):
                reader.dequeue(PATIENCE)
        broken(monkeypatch)
        writer.enqueue("object")
        assert local.dequeue(PATIENCE) == "object"
        for reader in readers:
            assert reader.dequeue(PATIENCE) == "object"
            with refuses(WrongRole), reader.acquire_read(PATIENCE):
                pass


def test_relay_that_fails_while_its_reader_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """That reader has closed, and has not died."""
    with relayed_queue(2) as (writer, readers):
        begun, go_on = Event(), Event()

        def wait_and_fail(*_: object) -> None:
            begun.set()
            go_on.wait(PATIENCE)
            raise MemoryError

        monkeypatch.setattr(relay.Relay, "_put", wait_and_fail)
        writer.enqueue("message")
        assert begun.wait(PATIENCE)
        closing = Aside(readers[0].close)
        until(lambda: readers[0]._reader._relay._reader_has_left)  # type: ignore[union-attr]
        go_on.set()
        closing.result()
        assert readers[1].dequeue(PATIENCE) == "message"
        until(lambda: states(writer) == ["closed", "running"])


def test_writer_closes_before_everybody_came() -> None:
    """Attached readers get everything, even more than the ring keeps for absent ones."""
    with remote_writer(3, relay=True, remote_liveness=LIVENESS) as writer, ExitStack() as stack:
        readers = [
            MessageQueue.create_from_handle(writer.export_handle(rank), rank) for rank in (0, 1)
        ]
        for reader in readers:
            stack.callback(reader.close)
        for number in range(10):
            writer.enqueue(number)
        closing = Aside(writer.close)
        for reading in [Aside(list, reader) for reader in readers]:
            assert reading.result() == list(range(10))
        with refuses(TimedOut, match=r"reader 2 \(never attached\) did not confirm"):
            closing.result()


def test_a_chunk_filled_by_hand_is_no_object_to_readers() -> None:
    """As on one host: the bytes are not an object, which each reader is told once."""
    with mixed_queue() as (writer, local, readers):
        with writer.acquire_write(PATIENCE) as chunk:
            chunk[:3] = b"abc"
        writer.enqueue("next")
        for reader in (local, *readers):
            with refuses(CorruptMessage):
                reader.dequeue(PATIENCE)
            assert reader.dequeue(PATIENCE) == "next"


@contextmanager
def cut_queue() -> Iterator[tuple[Cable, MessageQueue, list[MessageQueue]]]:
    """Two readers behind a relay whose connection can be cut."""
    with remote_writer() as first:
        cable = Cable(first.export_handle(0))
    with cable:

        def through(handle: Any) -> Any:
            cable._to = ("127.0.0.1", int(handle.remote_subscribe_addr.rpartition(":")[2]))
            handle.remote_subscribe_addr = cable.handle.remote_subscribe_addr
            return handle

        with relayed_queue(2, through, remote_liveness=PATIENCE) as (writer, readers):
            yield cable, writer, readers


def test_connection_that_comes_back() -> None:
    """A cut between the hosts loses and repeats nothing for the readers behind the relay."""
    with cut_queue() as (cable, writer, readers):
        for number in range(60):
            if number % 20 == 10:
                cable.cut(mend=True)
            writer.enqueue(number, PATIENCE)
            for reader in readers:
                assert reader.dequeue(PATIENCE) == number


def test_a_connection_that_comes_back_reads_nothing() -> None:
    """Messages the relay has taken count as unread until its own reader has read them."""
    with cut_queue() as (cable, writer, readers):
        ring = readers[0]._reader._relay.ring  # type: ignore[union-attr]
        for number in (1, 2):
            writer.enqueue(number)
            until(lambda: ring.native.position == number)  # noqa: B023
            cable.cut(mend=True)
        writer.enqueue(3)
        until(lambda: ring.native.position == 3)
        assert [row.behind for row in writer.statistics().readers] == [3, 3]


@pytest.mark.parametrize(
    "row",
    [
        ReportRow(7, 1, "dead", 0),
        ReportRow(-1, 1, "dead", 0),
        ReportRow(1, 1, "dead", 0),
        ReportRow(2, 1, "running", 1000),
    ],
)
def test_reports_that_cannot_be(row: ReportRow) -> None:
    """Reports count only for readers behind that relay, and for messages that were sent."""
    with remote_writer(3, relay=True) as writer, ExitStack() as stack:
        for rank in (0, 2):
            reader = MessageQueue.create_from_handle(writer.export_handle(rank), rank)
            stack.callback(reader.close)
        held = writer._writer.session.places  # type: ignore[union-attr]
        report = wire.Report(*held.peers[0].ring, [row])
        with refuses(CorruptMessage) if row.place in (7, -1, 2) else nullcontext():
            assert held.rows_of(held.peers[0], report, 0) == []
        assert [r.state for r in writer.statistics().readers] == ["running", "absent", "running"]


def test_one_reader_of_a_host_in_a_group_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the remote readers that share memory connects; `relay=False` connects them all."""
    monkeypatch.setattr(
        grouping, "_same_node", lambda group, source: [r == source for r in range(group.size)]
    )
    before = segments()
    with groups_of("tcp", 4) as groups:
        for shared, connections in (True, 1), (False, 3):
            with queues_over(groups, 2, relay=shared, connect_ip="127.0.0.1") as queues:
                until(lambda: segments() == before)
                assert connections_of(queues[2]) == connections
                queues[2].enqueue("hello")
                for rank in (0, 1, 3):
                    assert queues[rank].dequeue(PATIENCE) == "hello"
                rows = queues[2].statistics().readers
                assert {row.rank for row in rows} == {0, 1, 3}
    assert segments() == before


def test_hosts_with_one_reader_need_no_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They need no relay."""
    monkeypatch.setattr(
        grouping, "_same_node", lambda group, source: [r == source for r in range(group.size)]
    )
    hosts = iter("abcdefghijkl")
    monkeypatch.setattr(shared_reader, "where_memory_is_shared", lambda: next(hosts))
    with (
        groups_of("tcp", 4) as groups,
        queues_over(groups, 2, connect_ip="127.0.0.1") as queues,
    ):
        assert not any(queues[rank]._is_local_reader for rank in (0, 1, 3))
        assert connections_of(queues[2]) == 3


def test_idle_relay_sleeps() -> None:
    """Writer, relay and 8 waiting readers together use far less than one that polls."""
    with relayed_queue(8):
        assert idle_share() < 0.05


@pytest.mark.parametrize("window", [{"remote_window": 1}, {"remote_window_bytes": 15_000}])
def test_the_ring_wakes_a_relay_with_a_full_window(
    monkeypatch: pytest.MonkeyPatch, window: dict[str, int]
) -> None:
    """The ring wakes the relay: the writer learns at once of each message read."""
    count, message = 10, bytes(10_000)
    monkeypatch.setattr(relay, "ACK_DELAY", 2 * PATIENCE)
    with relayed_queue(2, **window) as (writer, readers):
        reading = [
            Aside(lambda r: [len(r.dequeue(PATIENCE)) for _ in range(count)], r) for r in readers
        ]
        for _ in range(count):
            writer.enqueue(message, PATIENCE)
        for each in reading:
            assert each.result() == [len(message)] * count


class Gone(Exception):
    """Simulates the end of a process in the middle of a call."""


@pytest.mark.parametrize("step", ["validate", "attach_at"])
def test_who_was_shown_the_ring_and_died(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Its place is free; the next reader gets its own stream if the ring's place is used up."""
    with remote_writer(2, relay=True) as writer, ExitStack() as stack:

        def attach(rank: int) -> MessageQueue:
            reader = MessageQueue.create_from_handle(writer.export_handle(rank), rank)
            stack.callback(reader.close)
            return reader

        def die(*_: object) -> None:
            raise Gone

        first = attach(0)
        with monkeypatch.context() as patch:
            where = shared_reader.address_of if step == "validate" else NetworkReader.attach_at
            patch.setattr(
                shared_reader if step == "validate" else NetworkReader, where.__name__, die
            )
            with pytest.raises(Gone):
                attach(1)
        writer.enqueue("first")
        with monkeypatch.context() as patch:
            patch.setattr(shared_reader, "where_memory_is_shared", lambda: "elsewhere")
            with refuses(RankTaken, match="which is attaching"):
                attach(1)
        second = attach(1)
        assert connections_of(writer) == (1 if step == "validate" else 2)
        assert [reader.dequeue(PATIENCE) for reader in (first, second)] == ["first"] * 2


def test_a_ring_that_others_may_open_is_not_read() -> None:
    """A ring that others may open is not read from, whoever names it."""
    with remote_writer(2, relay=True) as writer, ExitStack() as stack:
        before = segments()
        readers = []
        for rank in (0, 1):
            for name in segments() - before:
                (SHM / name).chmod(0o666)
            handle = writer.export_handle(rank)
            readers.append(MessageQueue.create_from_handle(handle, rank))
            stack.callback(readers[-1].close)
        assert connections_of(writer) == 2
        writer.enqueue("hello")
        assert [reader.dequeue(PATIENCE) for reader in readers] == ["hello"] * 2


def test_a_relay_that_ends_while_another_attaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader gets its own stream, from the first message on."""
    with remote_writer(2, relay=True, remote_liveness=LIVENESS) as writer, ExitStack() as stack:
        first = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        writer.enqueue("first")
        attach_at = NetworkReader.attach_at

        def late(self: NetworkReader, *where: Any) -> bool:
            first._end.abandon()
            until(lambda: writer.statistics().readers[0].state == "dead")
            return attach_at(self, *where)

        monkeypatch.setattr(NetworkReader, "attach_at", late)
        second = MessageQueue.create_from_handle(writer.export_handle(1), 1)
        stack.callback(second.close)
        writer.release_reader(0)
        writer.enqueue("second", PATIENCE)
        assert [second.dequeue(PATIENCE) for _ in range(2)] == ["first", "second"]
        assert [row.state for row in writer.statistics().readers] == ["closed", "running"]


def test_a_place_that_was_released_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that attaches too late gets an error; the relay does not wait for it."""
    with remote_writer(2, relay=True) as writer, ExitStack() as stack:
        first = MessageQueue.create_from_handle(writer.export_handle(0), 0)
        stack.callback(first.close)
        attach_at = NetworkReader.attach_at

        def late(self: NetworkReader, *where: Any) -> bool:
            writer.release_reader(1)
            return attach_at(self, *where)

        monkeypatch.setattr(NetworkReader, "attach_at", late)
        with refuses(ReaderGivenUp, match="reader 1 is closed"):
            MessageQueue.create_from_handle(writer.export_handle(1), 1)
        for number in range(20):
            writer.enqueue(number, PATIENCE)
            assert first.dequeue(PATIENCE) == number


def test_many_who_are_absent() -> None:
    """More names than fit a frame: the first are named, the others counted."""
    with (
        remote_writer(2500) as writer,
        MessageQueue.create_from_handle(writer.export_handle(0), 0) as reader,
    ):

        def are_named() -> bool:
            with refuses(TimeoutError) as caught:
                reader.wait_until_ready(0.1)
            return str(caught.value).endswith("reader 8 (never attached) and 2491 more")

        until(are_named, "the writer has said who is absent")


def test_an_idle_relay_keeps_no_message() -> None:
    """Whatever the size of the last one: its memory is free once it is in the ring."""

    def large() -> list[int]:
        messages = [thing for thing in gc.get_objects() if type(thing) is Message]
        return [message.sequence for message in messages if len(message.memory) > 1 << 20]

    with relayed_queue() as (writer, readers):
        for message in (b"b" * (3 << 20), [b"a" * (3 << 20)]):
            writer.enqueue(message, PATIENCE)
            for reader in readers:
                assert reader.dequeue(PATIENCE) == message
            until(lambda: not large())
