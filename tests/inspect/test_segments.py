"""`memlane.inspect`: what any process of the same user sees of the others, untouched."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from memlane import MessageQueue, ShmRingBuffer, inspect
from memlane._native import sweep_dead_segments
from memlane.inspect.looks import Looks
from memlane.inspect.segment import Segment, files, opened
from memlane.tiers import BlockPool
from memlane.tiers.conformance import wait_for
from tests.support import PATIENCE, assert_in_time, until
from tests.support.disk_tiers import tier_on
from tests.support.queues import (
    fill,
    name_in,
    path_of,
    queue_of,
    refuses,
    start_reader,
    start_writer,
    sweep,
)
from tests.support.regions import PAGE, new_id, region_of, start_region
from tests.support.regions import path_of as path_of_region
from tests.support.stores import store_of

AFTER = 0.2


def seen(name: str) -> Segment:
    (segment,) = [one for one in inspect.segments() if one.name == name]
    return segment


def waits_of(name: str, after: float = AFTER) -> list[inspect.Wait]:
    return [wait for wait in inspect.stuck(after) if wait.segment == name]


def until_stuck(name: str, count: int = 1) -> list[inspect.Wait]:
    """Returns what the first look sees that sees so many."""
    seen: list[inspect.Wait] = []

    def are_stuck() -> bool:
        seen[:] = waits_of(name)
        return len(seen) >= count

    until(are_stuck, f"{count} are stuck")
    return seen


@contextmanager
def blocked_writer(n_readers: int = 2) -> Iterator[tuple[MessageQueue, threading.Thread]]:
    """A writer of this process whose other thread is blocked on a full ring."""
    with MessageQueue(n_readers, n_readers, max_chunk_bytes=64, max_chunks=2) as writer:
        yield writer, threading.Thread(target=_block, args=(writer,), daemon=True)


def _block(writer: MessageQueue) -> None:
    fill(writer)
    writer.enqueue("one more", timeout=PATIENCE)


def test_a_queue_shows_its_geometry_and_processes() -> None:
    """Kind, geometry, and each process with rank, pid, start, state, position and lag."""
    with MessageQueue(2, 2, [3, 5], max_chunk_bytes=64, max_chunks=4) as writer:
        reader = start_reader(writer.export_handle(5), 5)
        writer.enqueue("a")
        writer.enqueue("b")
        assert reader.call("dequeue", timeout=PATIENCE) == "a"
        segment = seen(path_of(writer).name)
        assert (segment.kind, segment.is_named, segment.is_leftover) == ("queue", True, False)
        assert segment.geometry == {"n_reader": 2, "max_chunk_bytes": 64, "max_chunks": 4}
        assert segment.pids == tuple(sorted((os.getpid(), reader.pid)))
        assert 0 < segment.used <= segment.size
        assert 0 <= time.time() - segment.created < PATIENCE
        own, absent, attached = segment.participants
        assert (own.role, own.rank, own.pid, own.position) == ("writer", None, os.getpid(), 2)
        assert (absent.state, absent.pid, absent.rank) == ("absent", None, 0)
        assert (attached.role, attached.rank, attached.pid) == ("reader", 5, reader.pid)
        assert (attached.state, attached.position, attached.behind) == ("running", 1, 1)
        assert attached.started is not None
        assert abs(time.time() - attached.started) < 2 * PATIENCE
        assert attached.last_progress is not None
        assert time.monotonic() - attached.last_progress < PATIENCE
        reader.peer.stop()
        assert seen(segment.name).participants[2].state == "stopped"
        reader.peer.resume()
        reader.peer.kill()
        assert seen(segment.name).participants[2].state == "dead"


def test_a_queue_without_a_name_is_found() -> None:
    """Once all have attached it is found through the processes that hold it."""
    with queue_of(1) as (writer, _):
        segment = seen(name_in(writer.handle))
        assert (segment.is_named, segment.kind) == (False, "queue")
        assert [who.state for who in segment.participants] == ["running", "running"]


def test_a_name_that_is_removed_between_listing_and_opening() -> None:
    """It is opened through a process that holds it."""
    with MessageQueue(1, 1, max_chunk_bytes=64, max_chunks=2) as writer:
        name = path_of(writer).name
        (found,) = [each for each in files() if name in each.names]
        start_reader(writer.export_handle()).call("wait_until_ready", PATIENCE)
        writer.wait_until_ready(PATIENCE)
        assert not Path("/dev/shm", name).exists()
        with opened(found) as file:
            assert file is not None


def test_a_large_message_does_not_hide_the_header() -> None:
    """Extents lie behind it, and may hold whatever looks like one."""
    with queue_of(1, max_chunk_bytes=64) as (writer, (reader,)):
        writer.enqueue(b"MEMLANE1" * 100_000)
        segment = seen(name_in(writer.handle))
        assert (segment.kind, segment.participants[0].extents) == ("queue", 1)
        assert len(reader.dequeue()) == 800_000


def test_a_store_shows_its_counters_and_who_keeps_space() -> None:
    """Its counters, and who keeps the writer from reusing space."""
    with store_of(2) as (writer, (first, _)):
        address, identity = writer.put("key", b"x" * 100)
        writer.put("other", b"y" * 50)
        assert first.get(address, identity) == b"x" * 100
        (segment,) = [
            one for one in inspect.segments() if one.kind == "store" and os.getpid() in one.pids
        ]
        assert (segment.counters["objects"], segment.counters["puts"]) == (2, 2)
        assert [who.owed for who in segment.participants[1:]] == [1, 2]
        assert [who.state for who in segment.participants] == ["running"] * 3


def test_memory_that_views_keep() -> None:
    """A view keeps whole chunks and extents of a queue; after the last view nobody keeps them."""
    with queue_of(1, max_chunk_bytes=8192) as (writer, (reader,)):
        name = name_in(writer.handle)
        writer.enqueue(np.zeros(2 << 20, np.uint8))
        large = reader.dequeue()
        assert 2 << 20 <= seen(name).participants[1].lent < 3 << 20
        assert writer.statistics().readers[0].lent == seen(name).participants[1].lent
        del large
        assert seen(name).participants[1].lent == writer.statistics().readers[0].lent == 0


def test_a_region_is_read_from_its_locks() -> None:
    """Geometry and holders are read from its locks alone."""
    instance = new_id()
    with region_of(instance, blocks=4, workers=2):
        other = start_region(instance, 1)
        segment = seen(path_of_region(instance).name)
        assert segment.kind == "region"
        assert segment.geometry == {
            "total_bytes": 8 * PAGE,
            "blocks": 4,
            "row_bytes": 2 * PAGE,
            "cell_bytes": PAGE,
        }
        assert [who.pid for who in segment.participants] == [os.getpid(), other.pid]
        assert not segment.is_leftover
        other.peer.kill()
        assert [who.pid for who in seen(segment.name).participants] == [os.getpid()]


def test_what_dead_processes_left_is_a_leftover() -> None:
    """Only once nobody holds it."""
    writer = start_writer()
    try:
        left = name_in(writer.greeting)
        assert left not in [segment.name for segment in inspect.leftovers()]
        writer.peer.kill()
        assert left in [segment.name for segment in inspect.leftovers()]
        assert seen(left).pids == ()
    finally:
        sweep()
    assert left not in [segment.name for segment in inspect.segments()]


def test_a_full_ring_names_the_stopped_reader() -> None:
    """And not the one that has read everything."""
    with blocked_writer() as (writer, thread):
        readers = [start_reader(writer.export_handle(), rank) for rank in range(2)]
        for reader in readers:
            reader.call("wait_until_ready", PATIENCE)
        readers[1].peer.stop()
        thread.start()
        readers[0].begin("dequeue", timeout=PATIENCE).outcome()
        readers[0].call("dequeue", timeout=PATIENCE)
        (wait,) = until_stuck(name_in(writer.handle))
        assert (wait.waiter.role, wait.reason) == ("writer", "no free chunk")
        assert [(who.rank, who.pid, who.state) for who in wait.awaited] == [
            (1, readers[1].pid, "stopped")
        ]
        assert f"kill -CONT {readers[1].pid}" in wait.advice
        assert AFTER <= wait.seconds < PATIENCE
        readers[1].peer.resume()
        readers[1].call("dequeue", timeout=PATIENCE)
        thread.join(PATIENCE)
        assert waits_of(name_in(writer.handle)) == []
        for reader in readers:
            reader.peer.kill()


def test_a_reader_of_an_idle_queue_is_not_stuck() -> None:
    """It is once its writer is stopped."""
    writer = start_writer()
    reader = start_reader(writer.greeting)
    name = name_in(writer.greeting)
    reader.begin("dequeue", timeout=PATIENCE).until_blocked()
    until(
        lambda: (seen(name).participants[1].activity_since or 1e18) < time.monotonic() - AFTER,
        "the wait lasts",
    )
    assert seen(name).participants[1].activity == "waiting"
    assert waits_of(name) == []
    writer.peer.stop()
    (wait,) = until_stuck(name)
    assert (wait.waiter.pid, wait.reason) == (reader.pid, "no new message")
    assert [who.pid for who in wait.awaited] == [writer.pid]
    writer.peer.resume()
    writer.call("enqueue", 1)
    assert reader.outcome() == 1
    for process in (writer, reader):
        process.peer.kill()
    sweep()


def test_a_writer_waits_for_those_that_have_not_attached() -> None:
    """wait_until_ready is a wait, too."""
    writer = start_writer(2)
    reader = start_reader(writer.greeting)
    writer.begin("wait_until_ready", PATIENCE).until_blocked()
    (wait,) = until_stuck(name_in(writer.greeting))
    assert (wait.waiter.pid, wait.reason) == (writer.pid, "not all attached")
    assert [who.rank for who in wait.awaited] == [1]
    for process in (writer, reader):
        process.peer.kill()
    sweep()


def test_an_open_block_is_seen() -> None:
    """A reader inside acquire_read is busy there, not waiting."""
    with queue_of(1) as (writer, (reader,)):
        writer.enqueue(1)
        with reader.acquire_read():
            who = seen(name_in(writer.handle)).participants[1]
            assert (who.activity, who.activity_since is not None) == ("in_block", True)
        assert seen(name_in(writer.handle)).participants[1].activity == "elsewhere"
        with writer.acquire_write():
            assert seen(name_in(writer.handle)).participants[0].activity == "in_block"


def test_looking_changes_nothing() -> None:
    """No page is allocated, no lock is held, no byte differs."""
    with queue_of(2, max_chunk_bytes=1 << 20) as (writer, readers):
        writer.enqueue(b"x")
        name = name_in(writer.handle)
        before = (seen(name).used, list(seen(name).participants))
        for _ in range(20):
            inspect.segments()
            inspect.stuck()
        assert (seen(name).used, list(seen(name).participants)) == before
        assert [reader.dequeue() for reader in readers] == [b"x", b"x"]


def test_a_segment_of_another_version_is_shown_as_such() -> None:
    """One line and no error."""
    with ShmRingBuffer(1, 64, 1) as ring:
        path = path_of(ring)
        data = bytearray(path.read_bytes())
        at = data.index(b"MEMLANE1")
        data[at + 8] = 99
        path.write_bytes(data)
        segment = seen(path.name)
        assert (segment.kind, segment.participants) == ("unknown", ())
        assert "layout version 99" in str(segment.problem)
        path.write_bytes(data[: at + 100])
        assert seen(path.name).kind == "unknown"


@pytest.mark.parametrize("after", [-1, float("nan"), True, "1"])
def test_a_nonsensical_stuck_after_is_refused(after: float) -> None:
    """It is refused."""
    with refuses(ValueError):
        inspect.stuck(after)


def test_a_pool_shows_its_counters() -> None:
    """Its counters, as the call before has left them; it ends with its pool."""
    pool = BlockPool(4, "lru")
    with pool.reserve([b"a", b"b"]) as new:
        new.commit()
    pool.touch([b"a", b"x"])
    (segment,) = own_tiers()
    assert segment.geometry == {"blocks": 4, "block_bytes": 0}
    assert (segment.is_named, segment.is_leftover, segment.pids) == (False, False, (os.getpid(),))
    assert segment.counters | {"used": 2, "stored": 2, "accesses": 2, "hits": 1} == segment.counters
    del pool, new
    assert own_tiers() == []


def test_a_disk_tier_shows_its_counters(tmp_path: Path) -> None:
    rows = np.zeros((4, 4096), np.uint8)
    with tier_on(tmp_path, rows, capacity=10) as tier:
        wait_for(tier, tier.store([b"a", b"b"], [0, 1]))
        wait_for(tier, tier.load([b"a", b"x"], [2, 3]))
        (segment,) = own_tiers()
        assert segment.geometry == {"blocks": 10, "block_bytes": 4096}
        wanted = {"used": 2, "stored": 2, "loaded": 1, "missed": 1, "queue": 0, "stalled": 0}
        assert segment.counters | wanted == segment.counters
    assert own_tiers() == []


def own_tiers() -> list[Segment]:
    """Pools and tiers of this process."""
    found = [one for one in inspect.segments() if one.kind == "tier"]
    return [one for one in found if os.getpid() in one.pids]


def test_delivery_times_are_counted() -> None:
    """The times of every message of a slow queue are counted; of a fast one those of some."""
    with queue_of() as (writer, (reader,)):
        name, began = name_in(writer.export_handle()), time.monotonic()
        for number in range(3):
            time.sleep(0.02)
            writer.enqueue(number)
            time.sleep(0.03)  # the time is what is tested
            assert reader.dequeue() == number
        deliveries = seen(name).participants[1].deliveries
        assert deliveries is not None
        assert sum(deliveries.counts[15:]) == sum(deliveries.counts) == 3  # 16 ms and more
        assert 0.09 <= deliveries.seconds < time.monotonic() - began
        began = time.monotonic()
        for number in range(20_000):
            writer.enqueue(number)
            reader.dequeue()
        ticks = (time.monotonic() - began) * 1000 + 2  # at most, of a kernel with HZ=1000
        deliveries = seen(name).participants[1].deliveries
        assert deliveries is not None
        assert 0 < sum(deliveries.counts) - 3 <= min(ticks, 10_000)
        assert seen(name).participants[0].deliveries is None


def test_later_looks_see_what_is_new_or_gone() -> None:
    """See what is new, gone, or has lost its name, as a first look does."""
    looks = Looks(after=AFTER, search_every=1000.0)
    with MessageQueue(1, 1) as writer:
        name = name_in(writer.export_handle())
        assert name in {segment.name for segment in looks.take().segments}
        with MessageQueue.create_from_handle(writer.export_handle(), 0) as reader:
            writer.wait_until_ready(PATIENCE)  # which removes the name
            writer.enqueue(1)
            until(lambda: is_seen(looks, name), "it is searched for", pause=0.1)
            reader.dequeue()
            (segment,) = [each for each in looks.take().segments if each.name == name]
            assert [who.position for who in segment.participants] == [1, 1]
    until(lambda: not is_seen(looks, name), "it has gone", pause=0.1)


def test_a_name_that_goes_soon_after_a_search() -> None:
    """The queue is missed for a second at most."""
    looks = Looks(after=AFTER, search_every=1000.0)
    looks.take()
    with MessageQueue(1, 1) as writer:
        name = name_in(writer.export_handle())
        assert is_seen(looks, name)
        with MessageQueue.create_from_handle(writer.export_handle(), 0):
            writer.wait_until_ready(PATIENCE)
            began = time.monotonic()
            until(lambda: is_seen(looks, name), "it is there again", pause=0.1)
            assert_in_time(2.0, began)  # and a search


def is_seen(looks: Looks, name: str) -> bool:
    return name in {segment.name for segment in looks.take().segments}


def test_a_creation_looks_at_so_many_names_and_clean_at_all() -> None:
    """However many there are, also of others; the rest is for the next creations."""
    most = 1024  # kMostPerCreation
    paths = [Path(f"/dev/shm/memlane-{number:032x}") for number in range(2 * most + 1)]
    try:
        for path in paths:
            path.touch(0o600)
        MessageQueue(1, 1).close()
        left = sum(path.exists() for path in paths)
        assert left == len(paths) - most
        sweep_dead_segments()
        assert not any(path.exists() for path in paths)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
