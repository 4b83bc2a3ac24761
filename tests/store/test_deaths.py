"""SD, SI: a reader that dies, or never reads, does not keep the storage full for ever.

Fails without the guard: a read count that includes a dead process's reads is never reached.
"""

import os
import signal
import time
from typing import Any

import pytest

from memlane import RankTaken, SegmentMissing, ShmObjectStorageHandle
from tests.support import Link, Remote, assert_in_time, serve, start, until
from tests.support.queues import BOUND, refuses, segments, sweep
from tests.support.stores import BytesSerde, Ring, Storage, fill, start_store_reader, store_of

ONE = bytes(52)


def small_store(n_readers: int, attached: int = 0) -> Any:
    """Ten objects of ONE fill it."""
    return store_of(n_readers, size=640, max_object_size=64, serde=Stuck, attached=attached)


class Stuck(BytesSerde):
    """Does not come back from decoding some objects."""

    def deserialize(self, data: memoryview) -> Any:
        if bytes(data[:5]) == b"stuck":
            signal.pause()
        return bytes(data)

    def deserialize_view(self, data: memoryview) -> Any:
        return data


def hold_view(reader: Storage, address: int, number: int) -> None:
    """Leaves a block open."""
    block = reader.view(address, number)
    block.__enter__()
    _open.append(block)


_open: list[object] = []


@pytest.mark.parametrize("held", ["nothing", "a view", "decoding"])
def test_a_dead_reader_gives_back_what_it_owed_and_pinned(held: str, method: str) -> None:
    """SD, SI: what it owed and pinned is given back at once; the other reader goes on."""
    with small_store(2) as (writer, _):
        doomed, other = (start_store_reader(writer, method) for _ in range(2))
        first = writer.put("0", b"stuck")
        places = [first, *fill(writer, ONE, "more ")]
        if held == "a view":
            doomed.call(hold_view, *first)
        elif held == "decoding":
            doomed.begin("get", *first).until_blocked()
            until(lambda: writer.statistics().readers[0].views == 1)
        other.call(hold_view, *first)  # reads nothing of it: this one knows how to decode a view
        other.call(close_views)
        for place in places[1:]:
            assert other.call("get", *place) == ONE
        with refuses(MemoryError) as caught:
            writer.put("new", ONE)
        (blocker,) = caught.value.readers
        assert (blocker.rank, blocker.pid, blocker.state) == (0, doomed.pid, "running")
        assert blocker.pins == (held != "nothing")
        killed = doomed.peer.kill()
        place = writer.put("new", ONE)
        assert_in_time(BOUND, killed)
        assert other.call("get", *place) == ONE
        assert writer.statistics().readers[0].state == "dead"
        for n in range(30):
            assert other.call("get", *writer.put(n, b"%d" % n)) == b"%d" % n


def close_views(_reader: Storage) -> None:
    while _open:
        _open.pop().__exit__(None, None, None)  # type: ignore[attr-defined]


def test_nobody_is_waited_for_once_all_are_dead() -> None:
    """Nobody is left to wait for."""
    with small_store(3) as (writer, _):
        remotes = [start_store_reader(writer) for _ in range(3)]
        places = fill(writer, ONE)
        for remote in remotes:
            remote.call(hold_view, *places[0])
        for remote in remotes:
            with refuses(MemoryError):
                writer.put("new", ONE)
            remote.peer.kill()
        for n in range(30):
            writer.put(n, ONE)


def test_a_successor_inherits_no_debts_of_the_dead() -> None:
    """Its place is taken again, and neither its debts nor its pins are the successor's."""
    with small_store(1) as (writer, _):
        doomed = start_store_reader(writer)
        places = fill(writer, ONE)
        doomed.call(hold_view, *places[0])
        doomed.call(hold_view, *places[3])
        with refuses(RankTaken):
            Storage.create_from_handle(writer.handle())
        doomed.peer.kill()
        successor = start_store_reader(writer)
        seen = writer.statistics().readers[0]
        assert (seen.pid, seen.state, seen.outstanding, seen.views) == (
            successor.pid,
            "running",
            0,
            0,
        )
        for n in range(10):
            assert successor.call("get", *writer.put(n, ONE)) == ONE
        successor.call(hold_view, *writer.key_index[0])
        with refuses(MemoryError) as caught:
            fill_more(writer)
        assert [(b.rank, b.pid, b.pins) for b in caught.value.readers] == [(0, successor.pid, 1)]
        successor.peer.kill()
        fill_more(writer)


def fill_more(writer: Storage) -> None:
    """Twice around."""
    for n in range(20):
        writer.put(f"{time.monotonic_ns()} {n}", ONE)


def test_a_live_reader_that_does_not_read() -> None:
    """It is named, with pid, state, and since when; a stopped one is not dead."""
    with small_store(1) as (writer, _):
        lazy = start_store_reader(writer)
        fill(writer, ONE)
        with refuses(MemoryError, match=f"reader 0 \\(pid {lazy.pid} .*, running.*has not read"):
            writer.put("new", ONE)
        lazy.peer.stop()
        with refuses(MemoryError, match=f"pid {lazy.pid} .*, stopped, .* s ago") as caught:
            writer.put("new", ONE)
        (blocker,) = caught.value.readers
        assert (blocker.state, blocker.owes) == ("stopped", 1)
        assert blocker.last_progress is not None
        assert blocker.last_progress <= time.monotonic()
        lazy.peer.resume()
        assert lazy.call("get", *writer.key_index["0"]) == ONE
        writer.put("new", ONE)
        lazy.leave()


def leave_without_close(link: Link, handle: ShmObjectStorageHandle, how: str) -> None:
    reader = Storage.create_from_handle(handle)
    _open.append(reader)
    link.tell()
    link.hear()
    if how == "exit":
        os._exit(0)


@pytest.mark.parametrize("how", ["exit", "end"])
def test_leaving_without_close_is_a_death(how: str) -> None:
    """An interpreter that ends otherwise is a death, and so nobody waits for it."""
    with small_store(1) as (writer, _):
        peer = start(leave_without_close, writer.handle(), how, method="spawn")
        peer.hear()
        fill(writer, ONE)
        with refuses(MemoryError):
            writer.put("new", ONE)
        peer.tell()
        peer.join()
        writer.put("new", ONE)
        assert writer.statistics().readers[0].state == "dead"


def writing(link: Link) -> None:
    """The role of a writer."""
    with Storage(64, 2, Ring(640, create=True), Stuck) as writer:
        serve(link, writer, writer.handle())


def test_the_writer_dies(method: str) -> None:
    """Objects in the storage stay readable, its state is shown, and the name is swept."""
    remote = Remote(start(writing, method=method))
    reader = Storage.create_from_handle(remote.greeting)
    place = remote.call("put", "k", b"value")
    name = remote.greeting.ring_buffer_handle[1]
    remote.peer.kill()
    assert reader.get(*place) == b"value"
    with reader.view(*place) as view:
        assert bytes(view) == b"value"
    seen = reader.statistics()
    assert (seen.writer_state, seen.writer_pid) == ("dead", remote.pid)
    sweep()
    assert name in segments()  # somebody has it
    del view
    reader.close()
    sweep()
    assert name not in segments()
    with refuses(SegmentMissing):
        Storage.create_from_handle(remote.greeting)


def test_a_group_that_is_killed() -> None:
    """The next creation removes what all of them left."""
    remote = Remote(start(writing))
    name = remote.greeting.ring_buffer_handle[1]
    reader = Remote(start(reading_of, remote.greeting))
    remote.peer.kill()
    reader.peer.kill()
    assert name in segments()
    sweep()
    assert name not in segments()


def reading_of(link: Link, handle: ShmObjectStorageHandle) -> None:
    with Storage.create_from_handle(handle) as reader:
        serve(link, reader)


def test_kills_in_the_middle_of_gets_harm_nobody_else() -> None:
    """Readers that are killed at any moment of their gets never harm the others."""
    with store_of(2, size=1 << 14, max_object_size=1 << 10, attached=1, serde=Stuck) as (
        writer,
        (steady,),
    ):
        for turn in range(30):
            doomed = start(get_for_ever, writer.handle())
            doomed.hear()
            places = [writer.put((turn, n), bytes([n]) * 900) for n in range(6)]
            doomed.tell(places)
            time.sleep(0.001 * (turn % 5))  # it dies anywhere in its loop
            doomed.kill()
            for n, place in enumerate(places):
                assert steady.get(*place) == bytes([n]) * 900
        seen = writer.statistics()
        assert seen.puts == 180
        assert seen.readers[1].state == "dead"


def get_for_ever(link: Link, handle: ShmObjectStorageHandle) -> None:
    reader = Storage.create_from_handle(handle)
    link.tell("attached")
    places = link.hear()
    while True:
        for place in places:
            reader.get(*place)
