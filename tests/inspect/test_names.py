"""Names that people give: shown instead of random digits wherever a queue is."""

import fcntl
import logging
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    Gather,
    InvalidArgument,
    InvalidType,
    MessageQueue,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
    StoreFull,
    TimedOut,
    WriterDied,
)
from memlane._base.labels import label_in
from memlane.cli import ls, top, writing
from memlane.inspect import locks, stuck
from memlane.inspect import segments as looked
from memlane.inspect.looks import Look
from memlane.inspect.segment import Segment
from memlane.inspect.waits import headline
from memlane.metrics import exposition
from memlane.metrics.catalogue import measure
from memlane.metrics.tally import Tally
from memlane.tiers import BlockPool, DiskArray, DiskTier
from tests.support import dismiss, until
from tests.support.queues import (
    fill,
    name_in,
    path_of,
    queue_of,
    segments,
    start_reader,
    start_writer,
)
from tests.support.regions import new_id, region_of

F_OFD_SETLK = 37
SHM = {"total": 1000, "used": 400, "free": 600}
NAMES = ["s", "vllm.response[1]", "a/b-C_9", "x" * 40]
REFUSED = ["", "x" * 41, "two words", "tab\t", "ö", "\x1b[2J", 'a"b', "a\0"]


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    dismiss()


def seen(queue: MessageQueue) -> Segment:
    return next(one for one in looked() if one.name == name_in(queue.handle))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_seen_by_both_ends_and_by_observers(name: str) -> None:
    with queue_of(name=name) as (writer, [reader]):
        assert (writer.name, reader.name, seen(writer).label) == (name, name, name)
        row = ls.row(seen(writer), None, 0.0)
        assert row[0] == name


@pytest.mark.parametrize("name", REFUSED)
def test_a_name_that_would_need_escaping_is_refused_before_anything_exists(name: str) -> None:
    before = segments()
    with pytest.raises(InvalidArgument, match="name must be 1 to 40 of the ASCII letters"):
        MessageQueue(1, 1, name=name)
    with pytest.raises(InvalidArgument, match="name must be 1 to 34 of the ASCII letters"):
        Gather(2, name=name)
    assert segments() == before


@pytest.mark.parametrize("name", [b"steps", 7])
def test_a_name_is_text(name: Any) -> None:
    with pytest.raises(InvalidType, match="name must be a string"):
        MessageQueue(1, 1, name=name)


def test_either_end_names_a_queue_that_has_none() -> None:
    with queue_of() as (writer, [reader]):
        assert writer.name == seen(writer).label == ""
        reader.name = "replies"
        assert writer.name == seen(writer).label == "replies"
        with pytest.raises(InvalidArgument):
            writer.name = "two words"
        assert reader.name == "replies"


@pytest.mark.parametrize("local", [0, 1])
def test_a_queue_has_its_name_on_other_hosts(local: int) -> None:
    ranks = list(range(local))
    writer = MessageQueue(
        1 + local, local, local_reader_ranks=ranks, connect_ip="127.0.0.1", name="steps"
    )
    with writer, MessageQueue.create_from_handle(writer.export_handle(), local) as reader:
        assert (writer.name, reader.name) == ("steps", "steps")
        with pytest.raises(TimedOut, match=r"queue steps: timed out after .* waiting for the w"):
            reader.dequeue(timeout=0.1)
        until(lambda: [each.label for each in looked()] == ["steps"] * 2, "both ends are shown")
        writer.name = "late"
        assert writer.export_handle().name == "late"


def test_what_a_peer_writes_there_is_shown_up_to_what_no_name_has() -> None:
    assert label_in(b"steps\0ghost") == "steps"
    assert label_in(b"a\x1b[2Jb".ljust(40, b"\0")) == "a"
    assert label_in(b"\xff" * 40) == ""
    with queue_of(name="steps", ready=False) as (writer, [reader]):
        with path_of(writer).open("r+b") as file:
            at = file.read().rindex(b"MEMLANE1")
            file.seek(at + 160)
            file.write(struct.pack("40s", b"st\x1bps"))
        assert reader.name == writer.name == seen(writer).label == "st"


def test_errors_and_log_lines_begin_with_it(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "0.1")
    with queue_of(name="steps") as (writer, _), caplog.at_level(logging.WARNING, "memlane"):
        fill(writer)
        with pytest.raises(TimedOut, match=r"^queue steps: timed out after 0\.3 s waiting for rea"):
            writer.enqueue(0, timeout=0.3)
    assert f"writer (pid {os.getpid()}" in caplog.text
    assert ") of steps blocked for" in caplog.text
    with (
        MessageQueue(2, 2, name="late") as late,
        pytest.raises(TimedOut, match=r"^queue late: timed out after 0 s waiting for reader 0"),
    ):
        late.wait_until_ready(0)


def test_a_death_names_the_queue() -> None:
    writer = start_writer(max_chunks=2)
    with MessageQueue.create_from_handle(writer.greeting, 0) as reader:
        reader.name = "steps"
        writer.peer.kill()
        with pytest.raises(WriterDied, match=r"died after 0 messages of queue steps, "):
            reader.dequeue()


def test_errors_of_a_gather_name_it() -> None:
    with Gather(1, name="replies") as gather:
        with pytest.raises(TimedOut, match=r"^gather replies: timed out after 0 s waiting for wri"):
            gather.wait_until_ready(0)
        with pytest.raises(TimedOut, match=r"^gather replies: timed out after 0 s; none of 1 "):
            gather.dequeue(0)


def test_stuck_and_the_metric_say_it() -> None:
    writer = MessageQueue(1, 1, None, 64, 2, name="steps")
    with writer:
        reader = start_reader(writer.handle)
        writer.wait_until_ready()
        fill(writer)
        until(lambda: stuck(0.0), "the full ring is seen")
        [wait] = stuck(0.0)
        assert " of steps blocked for " in headline(wait, writing.title(wait.segment, wait.label))
        text = exposition.text(measure(Look(0.0, looked(), [wait]), SHM, Tally()))
        stuck_line = next(line for line in text.splitlines() if line.startswith("memlane_stuck_"))
        assert 'queue="steps"' in stuck_line
        assert name_in(writer.handle) not in text
        reader.peer.kill()


def test_series_survive_a_restart_and_two_of_one_name_stay_two() -> None:
    def labels() -> set[str]:
        text = exposition.text(measure(Look(0.0, looked(), []), SHM, Tally()))
        lines = [line for line in text.splitlines() if line.startswith("memlane_queue_chunks{")]
        return {line.partition('"')[2].partition('"')[0] for line in lines}

    for _ in range(2):
        with queue_of(name="steps"):
            assert labels() == {"steps"}
    with queue_of(name="steps") as (one, _), queue_of(name="steps") as (two, _):
        assert labels() == {f"steps-{each.handle.queue_id[:10]}" for each in (one, two)}
        assert {row[0] for row in map(top._row, looked(), [None] * 2)} == {"steps"}
    with queue_of() as (plain, _), queue_of(name=f"memlane-{plain.handle.queue_id}"[:40]):
        assert len(labels()) == 2


def test_a_gather_names_its_rings() -> None:
    with Gather(3, 64, 2, name="replies") as gather:
        assert sorted(one.label for one in looked()) == [f"replies[{rank}]" for rank in range(3)]
        handle = gather.export_handle(1)
        with Gather.create_from_handle(handle, 1) as writer:
            fill(writer)
            with pytest.raises(TimedOut, match=r"^queue replies\[1\]: timed out after 0 s waiting"):
                writer.enqueue(0, timeout=0)


def storage(name: str | None) -> SingleWriterShmObjectStorage:
    ring = SingleWriterShmRingBuffer(4096, create=True)
    try:
        return SingleWriterShmObjectStorage(1024, 1, ring, name=name)
    except BaseException:
        ring.close()
        raise


def test_stores_pools_and_tiers_have_names_too(tmp_path: Path) -> None:
    rows = np.zeros((4, 4096), np.int8)
    pool = BlockPool(8, "lru", name="kv.pool")
    folders = [tmp_path / "a", tmp_path / "b"]
    with (
        storage("images") as store,
        DiskTier(tmp_path, rows, 1 << 16, name="kv.disk") as disk,
        DiskArray(folders, rows, 1 << 16, name="kv.disks") as disks,
    ):
        found = looked()
        labels = {"images", "kv.pool", "kv.disk", "kv.disks[0]", "kv.disks[1]"}
        assert {each.label for each in found} == labels
        assert {ls.row(each, None, 0.0)[0] for each in found} == labels
        assert (store.name, pool.name, disk.name) == ("images", "kv.pool", "kv.disk")
        assert [each.name for each in disks.disks.values()] == ["kv.disks[0]", "kv.disks[1]"]
        text = exposition.text(measure(Look(0.0, found, []), SHM, Tally()))
        assert 'memlane_store_objects{store="images"} 0' in text
        assert 'memlane_tier_blocks{tier="kv.pool"} 8' in text
        assert not [each.name for each in found if each.name in text]
        with SingleWriterShmObjectStorage.create_from_handle(store.handle()) as reader:
            assert reader.name == "images"
            store.put("a", b"x" * 900)  # the reader has yet to read it
            with pytest.raises(StoreFull, match=r"^store images: no room for 'b', 9"):
                [store.put(key, b"x" * 900) for key in "cdeb"]


def region() -> Segment:
    (found,) = looked()
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_region_has_the_name_that_its_first_holder_gives(name: str) -> None:
    """Its file is all its users', so the name is in its locks: as long as one holds it who knows
    the name."""
    instance = new_id()
    first = region_of(instance, 0, name=name)
    with region_of(instance, 1, name="another") as second:
        with region_of(instance, None) as third:
            assert (first.name, second.name, third.name) == (name,) * 3
            first.cleanup()
            assert (region().kind, region().label) == ("region", name)
            text = exposition.text(measure(Look(0.0, looked(), []), SHM, Tally()))
            assert f'memlane_region_holders{{region="{name}"}} 2' in text
            assert ls.row(region(), None, 0.0)[0] == name
        assert region().label == name


def test_a_region_without_a_name_gets_that_of_a_later_holder() -> None:
    instance = new_id()
    with region_of(instance, 0) as first:
        assert (first.name, region().label) == ("", "")
        with region_of(instance, 1, name="kv"):
            assert region().label == "kv"
        assert region().label == ""


def test_what_holders_lock_as_a_regions_name_is_shown_up_to_what_no_name_has() -> None:
    instance = new_id()
    with region_of(instance, 0) as held, open(held.mmap_path, "r+b") as file:
        for word in range(6):  # letters of 7 bits: `ab` and an escape, or all bits
            start = locks._LABEL + word * locks._LABEL_SPAN
            length = 0x61 | 0x62 << 7 | 0x1B << 14 if word == 0 else (1 << 49) - 1
            shared = locks._FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, start, length, 0)
            fcntl.fcntl(file, F_OFD_SETLK, shared)
        assert region().label == "ab"
        with region_of(instance, 1) as other:
            assert other.name == "ab"


def test_a_bad_name_of_a_store_a_pool_or_a_tier_makes_nothing(tmp_path: Path) -> None:
    rows, folder = np.zeros((4, 4096), np.int8), tmp_path / "kv"
    for name in ("two words", 7):
        with pytest.raises((InvalidArgument, InvalidType), match="name must be"):
            storage(name)  # type: ignore[arg-type]
        with pytest.raises((InvalidArgument, InvalidType), match="name must be"):
            BlockPool(8, name=name)  # type: ignore[arg-type]
        for tier in (DiskTier, DiskArray):
            path: Any = folder if tier is DiskTier else [folder]
            with pytest.raises((InvalidArgument, InvalidType), match="name must be"):
                tier(path, rows, 1 << 16, name=name)
        with pytest.raises((InvalidArgument, InvalidType), match="name must be"):
            region_of(new_id(), name=name)
    assert not folder.exists()
    assert not looked()
