"""A remote reader's place changes hands: `readmit`, and readers that attach late."""

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from memlane import (
    AccessRefused,
    Handle,
    InvalidArgument,
    MessageQueue,
    RankTaken,
    ReaderDied,
    ReaderGivenUp,
    TimedOut,
    WrongRole,
)
from memlane.broadcast.network.keys import Keys
from tests.support import PATIENCE, Remote, until
from tests.support.queues import drain, refuses, start_reader
from tests.support.remote_queues import (
    BRIEF,
    relayed_queue,
    remote_queue,
    remote_writer,
    start_remote_reader,
)

OPTIONS = pytest.mark.parametrize(
    "options",
    [{}, {"insecure_network": True, "serializer": "msgpack"}],
    ids=["curve", "plaintext"],
)


def dies(writer: MessageQueue, reader: Remote, rank: int = 0) -> None:
    """Kills that reader, and releases it once the writer has raised."""
    reader.peer.kill()
    until(lambda: writer.statistics().readers[rank].state == "dead")
    with refuses(ReaderDied) as caught:
        writer.enqueue("never")
    assert (caught.value.rank, caught.value.pid) == (rank, reader.pid)
    writer.release_reader(rank)


@OPTIONS
def test_a_killed_reader_is_replaced(options: dict[str, Any]) -> None:
    """The next message is its successor's first; the others, here and elsewhere, notice nothing."""
    with (
        remote_writer(2, 1, remote_window=4096, **BRIEF, **options) as writer,
        ExitStack() as stack,
    ):
        others = []
        for rank in (0, 2):
            others.append(MessageQueue.create_from_handle(writer.export_handle(rank), rank))
            stack.callback(others[-1].close)
        reader = start_remote_reader(writer, 1)
        writer.wait_until_ready(PATIENCE)
        for lap in range(3):
            writer.enqueue(["before", lap])
            assert reader.call("dequeue", PATIENCE) == ["before", lap]
            assert [other.dequeue(PATIENCE) for other in others] == [["before", lap]] * 2
            reader.peer.kill()
            until(lambda: writer.statistics().readers[1].state == "dead")
            with refuses(ReaderDied):
                writer.enqueue("never")
            with refuses(ValueError, match="reader 1 is dead"):
                writer.readmit(1)
            writer.release_reader(1)
            writer.enqueue(["missed", lap])
            handle = Handle.from_json(writer.readmit(1).to_json())
            with refuses(TimedOut, match=r"reader 1 \(never attached"):
                writer.wait_until_ready(0.05)
            writer.enqueue(["kept", lap])
            reader = start_reader(handle, 1)
            writer.wait_until_ready(PATIENCE)
            writer.enqueue(["next", lap])
            for kind in ("kept", "next"):
                assert reader.call("dequeue", PATIENCE) == [kind, lap]
            assert reader.call("statistics").messages == 2
            for other in others:
                got = [other.dequeue(PATIENCE)[0] for _ in range(3)]
                assert got == ["missed", "kept", "next"]
        reader.call("close")


def test_a_reader_that_has_closed() -> None:
    """Again and again; what was sent in between is for nobody."""
    with remote_writer() as writer:
        handle = writer.export_handle(0)
        for number in range(4):
            reader = MessageQueue.create_from_handle(handle, 0)
            writer.wait_until_ready(PATIENCE)
            writer.enqueue(np.full(300_000, number))
            assert (reader.dequeue(PATIENCE) == number).all()
            reader.close()
            until(lambda: writer.statistics().readers[0].state == "closed")
            writer.enqueue("to nobody")
            handle = writer.readmit(0)
        writer.release_reader(0)


@OPTIONS
def test_who_has_the_old_handle(options: dict[str, Any]) -> None:
    """Is refused, before and after the place is taken."""
    with remote_writer(**BRIEF, **options) as writer:
        old = writer.export_handle(0)
        dies(writer, start_reader(old))
        with refuses(RankTaken):
            MessageQueue.create_from_handle(old, 0)
        new = writer.readmit(0)
        assert new.remote_reader_keys != old.remote_reader_keys
        assert writer.export_handle(0).remote_reader_keys == new.remote_reader_keys
        with refuses(RankTaken, match="the place of that key, .* is another's by now"):
            MessageQueue.create_from_handle(old, 0)
        with MessageQueue.create_from_handle(new, 0) as reader:
            with refuses(RankTaken):
                MessageQueue.create_from_handle(old, 0)
            with refuses(RankTaken, match="its place was taken by pid"):
                MessageQueue.create_from_handle(new, 0)
            writer.enqueue("here")
            assert reader.dequeue(PATIENCE) == "here"


def test_who_was_stopped_and_comes_back() -> None:
    """It was declared dead, and its place is another's."""
    with remote_writer(remote_liveness=0.5) as writer:
        reader = start_remote_reader(writer)
        writer.wait_until_ready(PATIENCE)
        waiting = reader.begin("dequeue")
        network: Any = writer._writer
        with network.locked():
            route = next(iter(network.session.places.connections()))
            network.session.silent(route, "its host is silent", 0.0)
        with refuses(ReaderDied):
            writer.enqueue("never", PATIENCE)
        writer.release_reader(0)
        with MessageQueue.create_from_handle(writer.readmit(0), 0) as new:
            writer.enqueue("here")
            assert new.dequeue(PATIENCE) == "here"
            with refuses(ReaderGivenUp):
                waiting.outcome()
            writer.enqueue("still here")
            assert new.dequeue(PATIENCE) == "still here"


def test_readers_behind_a_relay_are_replaced() -> None:
    """The relay, and one of those behind it, are replaced by readers with streams of their own."""
    for rank in (0, 2):
        with relayed_queue(remote_liveness=0.5) as (writer, readers):
            for number in range(3):
                writer.enqueue(number, PATIENCE)
                assert [reader.dequeue(PATIENCE) for reader in readers] == [number] * 3
            readers[rank]._end.abandon()
            until(lambda: writer.statistics().readers[rank].state == "dead")  # noqa: B023
            writer.release_reader(rank)
            with MessageQueue.create_from_handle(writer.readmit(rank), rank) as new:
                everybody = [reader for reader in readers if reader is not readers[rank]] + [new]
                for number in range(20):
                    writer.enqueue(number, PATIENCE)
                    assert [reader.dequeue(PATIENCE) for reader in everybody] == [number] * 3


def test_wrong_ranks_are_refused() -> None:
    """They are refused, and nothing changes."""
    with remote_queue(2) as (writer, readers):
        with refuses(WrongRole):
            readers[0].readmit(0)
        with refuses(ValueError, match="reader 1 is running"):
            writer.readmit(1)
        with refuses(ValueError, match="no reader 7"):
            writer.readmit(7)
        with refuses(ValueError):
            writer.readmit(-1)
        writer.enqueue("here", PATIENCE)
        assert [reader.dequeue(PATIENCE) for reader in readers] == ["here"] * 2
    with remote_writer(2) as writer, refuses(ValueError, match="reader 0 is absent"):
        writer.readmit(0)


@pytest.mark.parametrize("relay", [False, True])
def test_late_readers_come_when_they_like(relay: bool) -> None:
    """Here and elsewhere: they come when they like, and nobody waits for them."""
    with remote_writer(2, 1, late_readers=True, relay=relay, remote_window=8) as writer:
        writer.wait_until_ready(0)
        for number in range(100):
            writer.enqueue(number, timeout=0)
        with ExitStack() as stack:
            readers = []
            for rank in (2, 0, 1):
                handle = writer.export_handle(rank)
                readers.append(MessageQueue.create_from_handle(handle, rank))
                stack.callback(readers[-1].close)
                readers[-1].wait_until_ready(PATIENCE)
                for number in range(20):
                    writer.enqueue(number, timeout=PATIENCE)
                    assert [reader.dequeue(PATIENCE) for reader in readers] == [number] * len(
                        readers
                    )
            assert [drain(reader) for reader in readers] == [[]] * 3
        writer.enqueue("to nobody", timeout=PATIENCE)


def test_a_handle_for_a_rank_that_never_comes() -> None:
    """Once it is released another rank has its place, if no message is gone; its handle is refused.

    Fails without the guard: `export_handle` of the other rank said that the place was released.
    """
    with remote_writer(**BRIEF) as writer:
        never = writer.export_handle(7)
        with refuses(InvalidArgument, match=r"belong to reader 7 \(never attached\)"):
            writer.export_handle(0)
        writer.release_reader(7)
        handle = writer.export_handle(0)
        with refuses(AccessRefused, RankTaken):
            MessageQueue.create_from_handle(never, 7, timeout=PATIENCE)
        with MessageQueue.create_from_handle(handle, 0) as reader:
            writer.wait_until_ready(PATIENCE)
            writer.enqueue("from the first")
            assert reader.dequeue(PATIENCE) == "from the first"
        with refuses(InvalidArgument):
            writer.export_handle(7)


def test_a_released_place_after_a_message() -> None:
    """Its new reader would miss that message: only `readmit` may allow that."""
    with remote_writer(**BRIEF) as writer:
        writer.export_handle(7)
        writer.release_reader(7)
        writer.enqueue("to nobody")
        with refuses(InvalidArgument, match=r"reader 7 \(released\)"):
            writer.export_handle(0)
        with MessageQueue.create_from_handle(writer.readmit(7), 7) as reader:
            writer.enqueue("here")
            assert reader.dequeue(PATIENCE) == "here"


def test_an_awaited_send_goes_on() -> None:
    """`readmit` and the next reader make room."""
    with remote_writer(remote_window=2, **BRIEF) as writer:
        dies(writer, start_remote_reader(writer))
        handle = writer.readmit(0)
        for number in range(2):
            writer.enqueue(number, timeout=0)
        with refuses(TimedOut, match="never attached"):
            writer.enqueue("too much", timeout=0)
        with MessageQueue.create_from_handle(handle, 0) as reader:
            assert [reader.dequeue(PATIENCE) for _ in range(2)] == [0, 1]
            writer.enqueue(2, timeout=PATIENCE)
            assert reader.dequeue(PATIENCE) == 2


def test_an_interrupted_readmit_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is repeated, as often as it takes."""
    with remote_writer(**BRIEF) as writer:
        dies(writer, start_remote_reader(writer))
        make = Keys._make

        def at_once(_self: Keys, _place: int, _ticket: int) -> None:
            raise KeyboardInterrupt

        def afterwards(self: Keys, place: int, ticket: int) -> None:
            make(self, place, ticket)
            raise KeyboardInterrupt

        for interrupted in (at_once, afterwards, afterwards, at_once):
            monkeypatch.setattr(Keys, "_make", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.readmit(0)
            monkeypatch.undo()
        for number in range(5):
            with MessageQueue.create_from_handle(writer.readmit(0), 0) as reader:
                writer.enqueue(number)
                assert reader.dequeue(PATIENCE) == number
            until(lambda: writer.statistics().readers[0].state == "closed")
        keys: Keys = writer._writer.keys  # type: ignore[union-attr]
        assert len(keys._tickets) == 2
        assert writer.handle.remote_reader_keys == writer.export_handle().remote_reader_keys


def test_nobody_is_owed_anything() -> None:
    """The place is open, and nothing was sent since: `close()` waits for nobody."""
    with remote_writer() as writer:
        with MessageQueue.create_from_handle(writer.export_handle(0), 0) as reader:
            writer.enqueue("one")
            assert reader.dequeue(PATIENCE) == "one"
        until(lambda: writer.statistics().readers[0].state == "closed")
        writer.readmit(0)
        MessageQueue.close(writer, timeout=PATIENCE)


def test_another_place_is_free() -> None:
    """A reader with all keys, of which one is old, takes it."""
    with remote_writer(2, late_readers=True) as writer:
        handle = writer.export_handle()
        first = MessageQueue.create_from_handle(handle, 1)
        first.close()
        until(lambda: "closed" in [row.state for row in writer.statistics().readers])
        writer.readmit(1)
        with MessageQueue.create_from_handle(handle, 9) as reader:
            writer.enqueue("here")
            assert reader.dequeue(PATIENCE) == "here"
