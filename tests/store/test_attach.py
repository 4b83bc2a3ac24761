"""Attaching to a storage: the readers' places, and handles."""

import copy
import json
import os
import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memlane import (
    Closed,
    InvalidArgument,
    LayoutMismatch,
    MsgpackSerde,
    RankTaken,
    SegmentMissing,
    ShmObjectStorageHandle,
    ShmRingBuffer,
)
from tests.support.queues import refuses, segments
from tests.support.stores import BytesSerde, Ring, Storage, fill, store_of

pytestmark = pytest.mark.unit

ONE = bytes(52)


def test_readers_take_the_places_in_order() -> None:
    """Readers take the places in order; one more than there are is refused."""
    with store_of(3, attached=0) as (writer, _):
        readers = [Storage.create_from_handle(writer.handle()) for _ in range(3)]
        assert [reader.statistics().rank for reader in readers] == [0, 1, 2]
        for _ in range(3):
            with refuses(RankTaken, match="all 3 readers of the storage have attached: pid "):
                Storage.create_from_handle(writer.handle())
        place = writer.put("k", b"x")
        assert [reader.get(*place) for reader in readers] == [b"x"] * 3
        for reader in readers:
            reader.close()


def test_absent_readers_owe_everything() -> None:
    """A reader that attaches late can still read what was put before."""
    with store_of(2, size=640, max_object_size=64, attached=1) as (writer, (early,)):
        places = fill(writer, ONE)
        early.get(*places[0])
        late = Storage.create_from_handle(writer.handle())
        with refuses(MemoryError):
            writer.put("new", ONE)
        assert late.get(*places[0]) == ONE
        writer.put("new", ONE)
        late.close()


def test_a_place_is_given_again() -> None:
    """A closed reader makes room; its successor is to read only what is referenced from then on."""
    with store_of(1, size=640, max_object_size=64) as (writer, (first,)):
        places = fill(writer, ONE)
        first.get(*places[0])
        first.close()
        second = Storage.create_from_handle(writer.handle())
        seen = writer.statistics().readers[0]
        assert (seen.state, seen.outstanding, seen.reads) == ("running", 0, 0)
        assert second.get(*places[9]) == ONE
        writer.get_cached("9")
        assert writer.statistics().readers[0].outstanding == 1
        writer.put("new", ONE)
        assert writer.statistics().readers[0].outstanding == 2
        second.get(*places[9])
        assert writer.statistics().readers[0].outstanding == 1
        with refuses(RankTaken):
            Storage.create_from_handle(writer.handle())
        second.close()


def test_absent_places_come_first() -> None:
    with store_of(2, attached=1) as (writer, (first,)):
        first.close()
        second = Storage.create_from_handle(writer.handle())
        third = Storage.create_from_handle(writer.handle())
        assert (second.statistics().rank, third.statistics().rank) == (1, 0)
        second.close()
        third.close()


def test_a_ring_has_one_storage() -> None:
    """A ring that has a storage gets no second one, even when the first is gone."""
    ring = Ring(4096, create=True)
    writer = Storage(1000, 1, ring, BytesSerde)
    with refuses(RankTaken, match="has a storage"):
        Storage(1000, 1, ring, BytesSerde)
    assert writer.get(*writer.put("k", b"x")) == b"x"
    del writer
    with refuses(RankTaken, match="has a storage"):
        Storage(1000, 1, ring, BytesSerde)
    ring.close()


@pytest.mark.parametrize("numbers", [(1000, 3), (999, 2), (1001, 2)])
def test_a_reader_with_other_numbers_is_refused(numbers: tuple[int, int]) -> None:
    """A reader with another object size or number of readers is refused; both are stated."""
    ring = Ring(4096, create=True)
    with Storage(1000, 2, ring, BytesSerde):
        mine = Ring(*ring.handle())
        text = rf"2 readers .* 1000 bytes, .* {numbers[1]} readers and objects of {numbers[0]} "
        with refuses(LayoutMismatch, match=text):
            Storage(*numbers, mine, BytesSerde)
        reader = Storage(1000, 2, mine, BytesSerde)
        reader.close()


def test_a_ring_without_a_storage_is_refused() -> None:
    ring = Ring(4096, create=True)
    other = Ring(*ring.handle())
    with refuses(LayoutMismatch, match="without a storage"):
        Storage(1000, 2, other, BytesSerde)
    other.close()
    ring.close()


def test_a_ring_of_another_system_is_refused() -> None:
    """A queue's ring is not a byte ring, though it is memlane's."""
    other = ShmRingBuffer(1, 64, 2)
    with refuses(LayoutMismatch):
        Ring(130, other.handle()[3])
    other.close()


@pytest.mark.parametrize("name", ["max_object_size", "n_readers", "max_objects"])
@pytest.mark.parametrize("value", [0, -1, 2**64, 2**100, 1.5, "4", True, [4]])
def test_impossible_numbers_are_refused(name: str, value: Any) -> None:
    """Impossible numbers are refused, and the ring can still get a storage."""
    ring = Ring(4096, create=True)
    good = {"max_object_size": 100, "n_readers": 1, "max_objects": 4}
    with refuses(ValueError, TypeError):
        Storage(ring_buffer=ring, **{**good, name: value})
    with Storage(ring_buffer=ring, **good):
        pass


def test_more_than_there_is() -> None:
    """A table larger than /dev/shm is refused, and leaves nothing."""
    before = segments()
    ring = Ring(4096, create=True)
    with refuses(MemoryError, match="shared memory"):
        Storage(100, 60000, ring, max_objects=2**31)
    with Storage(100, 1, ring) as writer:
        assert writer.get(*writer.put("k", 1)) == 1
    assert segments() == before


def test_what_is_no_ring_is_refused() -> None:
    with refuses(TypeError):
        Storage(100, 1, "memlane-x")  # type: ignore[arg-type]
    with refuses(TypeError):
        Storage.create_from_handle("memlane-x")  # type: ignore[arg-type]


@pytest.mark.parametrize("send", [pickle.dumps, copy.copy])
def test_a_storage_travels_by_its_handle(send: Callable[[object], object]) -> None:
    """Neither it nor its ring can be pickled, and the error says what to send instead."""
    with store_of() as (writer, (reader,)):
        for end in (writer, reader, writer.ring_buffer, reader.ring_buffer):
            with refuses(TypeError, match=r"cannot be pickled or copied: send handle\(\)"):
                send(end)


def test_a_handle_is_comparable_and_can_be_pickled() -> None:
    """A dataclass: comparable, picklable, with the fields of vLLM's handle."""
    with store_of(2, size=4096, max_object_size=100, serde=MsgpackSerde) as (writer, readers):
        handle = writer.handle()
        assert handle == ShmObjectStorageHandle(
            100, 2, writer.ring_buffer.handle(), MsgpackSerde, None
        )
        assert pickle.loads(pickle.dumps(handle)) == handle
        assert readers[0].handle() == handle
        assert replace(handle, n_readers=3) != handle
        assert ShmObjectStorageHandle.from_json(handle.to_json()) == handle
        assert ShmObjectStorageHandle.from_json(handle.to_json().encode()) == handle


def test_a_reader_attaches_by_text() -> None:
    with store_of(1, serde=MsgpackSerde, attached=0) as (writer, _):
        handle = ShmObjectStorageHandle.from_json(writer.handle().to_json())
        with Storage.create_from_handle(handle) as reader:
            assert reader.get(*writer.put("k", [1])) == [1]


class Registered(BytesSerde):
    pass


def test_a_text_names_registered_serdes_only() -> None:
    """Only registered names are accepted; nothing is imported because of a text."""
    handle = ShmObjectStorageHandle(100, 1, (4096, "memlane-x"), Registered)
    with refuses(ValueError, match="not registered"):
        handle.to_json()
    with refuses(ValueError, match="lock"):
        replace(handle, serde_class=MsgpackSerde, reader_lock=object()).to_json()
    ShmObjectStorageHandle.register_serde(Registered, "tests.registered")
    ShmObjectStorageHandle.register_serde(Registered, "tests.registered")
    with refuses(ValueError):
        ShmObjectStorageHandle.register_serde(BytesSerde, "tests.registered")
    assert ShmObjectStorageHandle.from_json(handle.to_json()) == handle
    fields = json.loads(handle.to_json())
    for name in ("os.system", "tests.support.stores.BytesSerde", "", None, 1):
        with refuses(ValueError):
            ShmObjectStorageHandle.from_json(json.dumps({**fields, "serde": name}))


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 99},
        {"format_version": None},
        {"max_object_size": 0},
        {"max_object_size": "1"},
        {"n_readers": -1},
        {"ring_buffer_handle": ["4096", "x"]},
        {"ring_buffer_handle": [4096, "../x"]},
        {"ring_buffer_handle": [4096]},
        {"ring_buffer_handle": 4},
        {"serde": ["MsgpackSerde"]},
    ],
)
def test_text_that_is_no_handle(change: dict[str, Any]) -> None:
    handle = ShmObjectStorageHandle(100, 1, (4096, "memlane-x"), MsgpackSerde)
    fields = json.loads(handle.to_json())
    with refuses(ValueError) as caught:
        ShmObjectStorageHandle.from_json(json.dumps({**fields, **change}))
    assert isinstance(caught.value, InvalidArgument)
    for key in fields:
        with refuses(ValueError):
            ShmObjectStorageHandle.from_json(
                json.dumps({name: value for name, value in fields.items() if name != key})
            )


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", "\xff", "[" * 5000, "{}"])
def test_text_that_is_nothing(text: str) -> None:
    with refuses(ValueError):
        ShmObjectStorageHandle.from_json(text)
    with refuses(TypeError):
        ShmObjectStorageHandle.from_json(3)  # type: ignore[arg-type]


def test_name_that_goes_with_the_last_reader() -> None:
    """A reader in the place of one that has left attaches through the writer's process."""
    with store_of(2, attached=0, unlink_when_complete=True) as (writer, _):
        name = writer.ring_buffer.handle()[1]
        one = Storage.create_from_handle(writer.handle())
        assert name in segments()
        two = Storage.create_from_handle(writer.handle())
        assert name not in segments()
        place = writer.put("k", ONE)
        assert [reader.get(*place) for reader in (one, two)] == [ONE, ONE]
        one.close()
        handle = writer.handle()
        with Storage.create_from_handle(handle) as three:
            assert three.get(*writer.put("l", ONE)) == ONE
        assert name not in segments()
        assert handle.writer_file is not None
        handle.writer_file = None
        with refuses(SegmentMissing, match="all its readers have attached"):
            Storage.create_from_handle(handle)
        two.close()


@pytest.mark.parametrize("where", ["another file", "another storage", "nothing", "nobody"])
def test_a_writers_descriptor_that_is_another_files_is_refused(where: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        writer, other = (
            stack.enter_context(store_of(1, attached=0, unlink_when_complete=True))[0]
            for _ in range(2)
        )
        for storage in (writer, other):
            Storage.create_from_handle(storage.handle()).close()
        handle = writer.handle()
        assert handle.writer_file is not None
        pid, file, number = handle.writer_file
        if where == "another file":
            file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
            stack.callback(os.close, file)
        elif where == "another storage":
            theirs = other.handle().writer_file
            assert theirs is not None
            file = theirs[1]
        elif where == "nothing":
            file = 2**31 - 1
        else:
            pid = 2**31 - 1
        handle.writer_file = pid, file, number
        with refuses(SegmentMissing, match="newer segment" if "storage" in where else "closed it"):
            Storage.create_from_handle(handle)


@pytest.mark.parametrize("wrong", [(0, 1, "0" * 32), (1, -1, "0" * 32), (1, 1, "0"), (1, 1), 3])
def test_a_writer_file_of_another_form_is_refused(wrong: Any) -> None:
    handle = ShmObjectStorageHandle(100, 1, (4096, "memlane-x"), MsgpackSerde, writer_file=wrong)
    with refuses(InvalidArgument):
        handle.validate()


def test_name_while_a_reader_is_missing() -> None:
    """It stays, even if another has attached and left, whose place can be taken."""
    with store_of(2, attached=0, unlink_when_complete=True) as (writer, _):
        name = writer.ring_buffer.handle()[1]
        Storage.create_from_handle(writer.handle()).close()
        readers = []
        for _ in range(2):
            assert name in segments()
            readers.append(Storage.create_from_handle(writer.handle()))
        assert name not in segments()
        for reader in readers:
            reader.close()


def test_the_storage_is_gone() -> None:
    with store_of(attached=0) as (writer, _):
        handle = writer.handle()
    with refuses(SegmentMissing):
        Storage.create_from_handle(handle)


def test_closing_is_final_on_both_ends() -> None:
    """Idempotent and final, on both ends; the name goes with the writer."""
    with store_of(2) as (writer, (one, two)):
        place = writer.put("k", b"x")
        name = writer.ring_buffer.handle()[1]
        one.close()
        one.close()
        assert name in segments()
        assert [reader.state for reader in writer.statistics().readers] == ["closed", "running"]
        writer.close()
        writer.close()
        assert name not in segments()
        assert two.get(*place) == b"x"  # what was stored can be read on
        assert two.statistics().writer_state == "closed"
        for end in (one, writer):
            assert end.is_closed
            for call in (
                lambda end=end: end.get(*place),
                lambda end=end: end.view(*place).__enter__(),
                end.handle,
                end.statistics,
                end.__enter__,
            ):
                with refuses(Closed):
                    call()
        for late in (
            lambda: writer.put("l", b"x"),
            lambda: writer.is_cached("k"),
            lambda: writer.get_cached("k"),
            lambda: writer.touch("k"),
            writer.release_touches,
            writer.free_unused,
            writer.clear,
        ):
            with refuses(Closed):
                late()
        assert "closed" in repr(writer)


def test_a_block_that_raises_announces_nothing() -> None:
    """To the peers it is a death, so its outstanding reads are dropped all the same."""
    with store_of(1, size=640, max_object_size=64, attached=0) as (writer, _):
        fill(writer, ONE)
        with (
            pytest.raises(ZeroDivisionError),
            Storage.create_from_handle(writer.handle()) as reader,
        ):
            raise ZeroDivisionError
        assert reader.is_closed
        assert writer.statistics().readers[0].state == "dead"
        writer.put("new", ONE)


def test_dropping_the_last_reference_frees_everything() -> None:
    """Everything is freed at once: a storage is in no reference cycle."""
    writer = Storage(64, 1, Ring(640, create=True), BytesSerde)
    name = writer.ring_buffer.handle()[1]
    reader = Storage.create_from_handle(writer.handle())
    places = fill(writer, ONE)
    reader.get(*places[0])
    del reader
    assert writer.statistics().readers[0].state == "dead"
    del writer
    assert name not in segments()
