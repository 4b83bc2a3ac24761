"""SingleWriterShmObjectStorage: put and get, their errors, and the bytes in the ring."""

import gc
import threading
from typing import Any

import numpy as np
import pytest

from memlane import MsgpackSerde, ObjectGone, StoreFull, WrongRole
from tests.support.queues import refuses, segments
from tests.support.stores import ArraySerde, BytesSerde, Ring, Storage, fill, store_of

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

ARRAY = np.arange(600, dtype=np.float32).reshape(20, 30)


def test_every_reader_gets_a_copy_of_what_was_put() -> None:
    """Every reader gets a copy of what was put."""
    with store_of(2, serde=ArraySerde) as (writer, readers):
        for number, value in enumerate([ARRAY, b"", b"bytes", ARRAY[::2].T]):
            place = writer.put(f"key {number}", value)
            assert place == writer.key_index[f"key {number}"]
            for end in [*readers, writer]:
                got = end.get(*place)
                np.testing.assert_array_equal(got, value)
                if isinstance(got, np.ndarray):
                    got[:] = 0
            for reader in readers:
                np.testing.assert_array_equal(reader.get(*place), value)


def test_the_attributes_of_vllms_class_are_there() -> None:
    """The attributes that callers of vLLM's class use."""
    with store_of(3, attached=1) as (writer, (reader,)):
        address, number = writer.put("k", b"value")
        assert (address, number) == (0, 0)
        assert writer.key_index == {"k": (0, 0)}
        assert writer.id_index == {0: "k"}
        assert writer.writer_flag == {0: 1}
        for end in (writer, reader):
            assert (end.flag_bytes, end.max_object_size, end.n_readers) == (4, 1 << 14, 3)
            assert end.serde_class is BytesSerde
            assert isinstance(end.ser_de, BytesSerde)
            assert isinstance(end.ring_buffer, Ring)
            assert end._reader_lock is None
        assert writer.is_writer
        assert not reader.is_writer
        assert writer.is_cached("k")
        assert not writer.is_cached("l")
        assert "writer" in repr(writer)
        assert "reader" in repr(reader)


def test_the_defaults_are_those_of_vllms_class() -> None:
    """Positions and defaults are those of vLLM's class."""
    ring = Ring(4096, create=True)
    with Storage(1000, 1, ring) as writer:
        assert writer.serde_class is MsgpackSerde
        place = writer.put("k", {"a": [1, "x"]})
        assert writer.get(*place) == {"a": [1, "x"]}
        assert writer.statistics().max_objects == 4096 // 1024 + 64


def count_of(writer: Storage, address: int) -> int:
    """The documented 4 bytes."""
    with writer.ring_buffer.access_buf(address) as (data, _):
        return writer.ring_buffer.byte2int(data[:4])


def test_an_object_lies_behind_its_count_and_metadata() -> None:
    """4 bytes of read count, the metadata, the data, and padding to 64."""
    with store_of(1, serde=ArraySerde) as (writer, (reader,)):
        for size in (0, 1, 63, 64, 65, 1000):
            value = bytes(range(256)) * 4
            address, number = writer.put(size, value[:size])
            assert address % 64 == 0
            with writer.ring_buffer.access_buf(address) as (data, (found, stored)):
                assert found == number
                assert stored % 64 == 0
                _, _, metadata, md_bytes = ArraySerde().serialize(value[:size])
                assert bytes(data[4 : 4 + md_bytes]) == metadata
                assert bytes(data[4 + md_bytes :][:size]) == value[:size]
                assert count_of(writer, address) == 0
                reader.get(address, number)
                assert count_of(writer, address) == 1


def test_the_count_is_the_sum_of_reads() -> None:
    """Per reader up to the references: surplus reads change nothing."""
    with store_of(2) as (writer, (one, two)):
        place = writer.put("k", b"x")
        for _ in range(3):
            one.get(*place)
        assert count_of(writer, place[0]) == 1
        two.get(*place)
        assert count_of(writer, place[0]) == 2
        writer.get_cached("k")
        for _ in range(3):
            one.get(*place)
        assert count_of(writer, place[0]) == 3
        writer.get(*place)
        assert count_of(writer, place[0]) == 3


def test_a_key_is_stored_once() -> None:
    """A key is stored once; anything hashable can be a key."""
    with store_of() as (writer, _):
        writer.put("k", b"1")
        with refuses(ValueError, match="already exists in the storage"):
            writer.put("k", b"2")
        for key in (1, None, ("a", 2), b"k"):
            writer.put(key, b"x")
            assert writer.is_cached(key)
        for call in (writer.is_cached, writer.get_cached, writer.touch):
            with refuses(TypeError):
                call([])  # type: ignore[arg-type]
        for call in (writer.get_cached, writer.touch):
            with refuses(KeyError, match="no object is stored under 'unknown'"):
                call("unknown")


def test_what_is_too_large_evicts_nothing() -> None:
    """The limit counts read count, metadata and data; nothing is evicted for what never fits."""
    with store_of(size=4096, max_object_size=100) as (writer, (reader,)):
        place = writer.put("fits", bytes(96))
        reader.get(*place)
        with refuses(ValueError, match=r"exceeds max object size \(100 bytes\)"):
            writer.put("k", bytes(97))
        assert writer.is_cached("fits")
        assert not writer.is_cached("k")


def test_sa_an_object_larger_than_the_ring_is_refused() -> None:
    """SA: MemoryError, and nothing changes, objects already read included."""
    with store_of(size=200, max_object_size=1000) as (writer, (reader,)):
        for value in (bytes(189), bytes(500)):
            need = len(value) + 4 + 8  # the count, and the allocation's header
            with refuses(
                MemoryError, match=rf"ring has \(200\); .* at least {need} bytes"
            ) as caught:
                writer.put("k", value)
            assert isinstance(caught.value, StoreFull)
            assert caught.value.key == "k"
            ring = writer.ring_buffer
            assert (ring.data_buffer_start, ring.data_buffer_end) == (0, 0)
            assert (ring.monotonic_id_end, writer.key_index) == (0, {})
        place = writer.put("whole", bytes(188))
        assert reader.get(*place) == bytes(188)
        with refuses(MemoryError):
            writer.put("k", bytes(189))
        assert reader.get(*place) == bytes(188)


@pytest.mark.parametrize("size", [107, 108])
def test_a_limit_above_the_ring_is_logged(size: int, caplog: pytest.LogCaptureFixture) -> None:
    """Once, when the storage is made: its readers and its objects are as ever."""
    with store_of(size=size, max_object_size=100) as (writer, (reader,)):
        assert reader.get(*writer.put("k", bytes(10))) == bytes(10)
    lines = [line for line in caplog.messages if "(max_object_size), but the ring has" in line]
    assert len(lines) == (size < 108)


def test_sb_a_handle_from_before_a_clear_gets_its_own_bytes() -> None:
    """SB: a handle from before clear() gets its own bytes until their space is used, then an
    error; ids go on, and are not used again."""
    with store_of() as (writer, (reader,)):
        old = writer.put("a", b"old")
        writer.clear()
        assert (writer.key_index, writer.id_index, writer.writer_flag) == ({}, {}, {})
        for end in (reader, writer):
            assert end.get(*old) == b"old"
        new = writer.put("b", b"new")
        assert new == (0, 1)
        for end in (reader, writer):
            with refuses(ValueError, match="has been modified or is invalid") as caught:
                end.get(*old)
            assert isinstance(caught.value, ObjectGone)
        assert reader.get(*new) == b"new"


class Trouble(Exception):
    pass


class Liar(BytesSerde):
    """Its value says what is wrong."""

    def serialize(self, value: Any) -> Any:
        if value == b"raises":
            raise Trouble
        data, nbytes, metadata, md_bytes = super().serialize(value)
        return {
            b"too much": ([data, data], nbytes, metadata, md_bytes),
            b"too little": (data[1:], nbytes, metadata, md_bytes),
            b"metadata": (data, nbytes, b"12", 1),
            b"negative": (data, -1, metadata, md_bytes),
            b"text": ("text", 4, metadata, md_bytes),
            b"tuple": ((data,), nbytes, metadata, md_bytes),
            b"part": (["text"], 4, metadata, md_bytes),
            b"gaps": ([memoryview(data)[::2]], len(data[::2]), metadata, md_bytes),
            b"no metadata": (data, nbytes, None, 0),
            b"no number": (data, "8", metadata, md_bytes),
            b"three": (data, nbytes, metadata),
            b"nothing": None,
        }.get(value, (data, nbytes, metadata, md_bytes))


@pytest.mark.parametrize(
    "value",
    [
        *(b"too much", b"too little", b"metadata", b"negative", b"text", b"tuple", b"part"),
        *(b"gaps", b"no metadata"),
    ],
)
def test_sc_a_serde_that_lies(value: bytes) -> None:
    """SC: the put raises ValueError, nothing is stored, and the storage works."""
    with store_of(size=256, max_object_size=128, serde=Liar) as (writer, (reader,)):
        writer.put("before", b"before")
        ring = writer.ring_buffer
        before = (ring.data_buffer_start, ring.data_buffer_end, ring.monotonic_id_end)
        for _ in range(20):
            with refuses(ValueError):
                writer.put("k", value)
            assert before == (
                ring.data_buffer_start,
                ring.data_buffer_end,
                ring.monotonic_id_end,
            )
        assert list(writer.key_index) == ["before"]
        assert writer.writer_flag == {0: 1}
        assert reader.get(*writer.put("k", b"good")) == b"good"
        assert writer.statistics().objects == 2


def test_sc_a_serde_that_raises() -> None:
    """SC: its error is raised."""
    with store_of(serde=Liar) as (writer, (reader,)):
        with pytest.raises(Trouble):
            writer.put("k", b"raises")
        for value in (b"no number", b"three", b"nothing"):
            with refuses(TypeError):
                writer.put("k", value)
        assert reader.get(*writer.put("k", b"good")) == b"good"


def test_unsupported_data_is_named() -> None:
    """Data that is neither bytes nor a list is named in the error."""
    with store_of(serde=Liar) as (writer, _), refuses(ValueError, match="Unsupported data type"):
        writer.put("k", b"tuple")


class Picky(BytesSerde):
    def deserialize(self, data: memoryview) -> Any:
        assert data.readonly
        if bytes(data) == b"unknown":
            raise Trouble
        return bytes(data)


def test_a_decoder_that_raises() -> None:
    """Its error is raised, the read is not counted, and nothing stays pinned."""
    with store_of(serde=Picky, size=256) as (writer, (reader,)):
        place = writer.put("k", b"unknown")
        for _ in range(3):
            with pytest.raises(Trouble):
                reader.get(*place)
        assert count_of(writer, place[0]) == 0
        facts = writer.statistics().readers[0]
        assert (facts.outstanding, facts.views) == (1, 0)


@pytest.mark.parametrize(
    ("address", "number"),
    [
        (0, 1),
        (64, 0),
        (0, 2**31 - 1),
        (0, -1),
        (-1, 0),
        (1 << 16, 0),  # the same place of the ring, but not the address of the object
        ((1 << 17) - 1, 0),
        (1 << 17, 0),
        (2**63, 0),
        (2**100, 0),
        (0, 2**32),
        (0, 2**100),
        (4, 0),
    ],
)
def test_sl_forged_addresses_are_refused(address: int, number: int) -> None:
    """SL: refused before anything is decoded."""

    class Never(BytesSerde):
        def deserialize(self, data: memoryview) -> Any:
            raise AssertionError("a forged address was decoded")

    with store_of(serde=Never) as (writer, (reader,)):
        writer.put("k", b"x")
        for end in (writer, reader):
            with refuses(ValueError, match="has been modified or is invalid"):
                end.get(address, number)
            with refuses(ValueError), end.view(address, number):
                pass


def test_sl_a_payload_that_imitates_a_header_is_never_an_object() -> None:
    """SL: bytes inside an object are never taken for an object."""
    with store_of() as (writer, (reader,)):
        ring = writer.ring_buffer
        fake = b"".join(ring.int2byte(n) for n in (1, 64, 0)) + b"fake"
        address, _ = writer.put("k", fake * 10)
        second = writer.put("l", b"real")
        for inside in range(address, address + 160):
            with refuses(ValueError):
                reader.get(inside, 1)
        assert reader.get(*second) == b"real"


@pytest.mark.parametrize("wrong", ["0", 1.0, None, [0], True])
def test_addresses_that_are_no_integers(wrong: Any) -> None:
    with store_of() as (writer, (reader,)):
        place = writer.put("k", b"x")
        with refuses(TypeError):
            reader.get(wrong, 0)
        with refuses(TypeError):
            reader.get(0, wrong)
        assert reader.get(*map(np.int64, place)) == b"x"


def test_the_writers_calls_are_refused_on_a_reader() -> None:
    """The writer's calls are refused on a reader, by name."""
    with store_of() as (_, (reader,)):
        calls = {
            "put": lambda: reader.put("k", b""),
            "is_cached": lambda: reader.is_cached("k"),
            "get_cached": lambda: reader.get_cached("k"),
            "touch": lambda: reader.touch("k"),
            "release_touches": reader.release_touches,
            "free_unused": reader.free_unused,
            "clear": reader.clear,
        }
        for name, call in calls.items():
            with refuses(WrongRole, match=f"Only the writer can {name}"):
                call()


def test_objects_are_told_apart_where_ids_wrap() -> None:
    """Objects across the wrap of the ids are told apart, also with a small table."""
    with store_of(size=1 << 12, max_objects=3) as (writer, (reader,)):
        writer.ring_buffer.monotonic_id_start = writer.ring_buffer.monotonic_id_end = 2**31 - 2
        places = [writer.put(n, b"%d" % n) for n in range(3)]
        assert [number for _, number in places] == [2**31 - 2, 2**31 - 1, 0]
        assert [reader.get(*place) for place in places] == [b"0", b"1", b"2"]


def test_the_oldest_is_evicted_first_where_ids_wrap() -> None:
    """The oldest goes first across the wrap, too."""
    with store_of(size=1 << 12, max_objects=3) as (writer, (reader,)):
        writer.ring_buffer.monotonic_id_start = writer.ring_buffer.monotonic_id_end = 2**31 - 4
        for n in range(12):
            place = writer.put(n, b"%d" % n)
            assert reader.get(*place) == b"%d" % n
            assert len(writer.key_index) <= 3
        assert writer.is_cached(11)
        assert place[1] == 7


@pytest.mark.parametrize("part", [bytearray(b"abcd"), memoryview(b"abcd"), b"abcd"])
def test_parts_may_be_any_contiguous_memory(part: Any) -> None:
    """Parts may be bytes, bytearray or memoryview, of any shape that is contiguous."""

    class Parts(BytesSerde):
        def serialize(self, value: Any) -> Any:
            square = memoryview(np.arange(6, dtype=np.int16).reshape(2, 3))
            return [part, b"", square], 16, memoryview(b"md"), 2

    with store_of(serde=Parts) as (writer, (reader,)):
        place = writer.put("k", None)
        assert reader.get(*place) == b"mdabcd" + np.arange(6, dtype=np.int16).tobytes()


def test_threads_may_read_at_once() -> None:
    """get and view of one reader in several threads, while the writer goes on."""
    with store_of(size=1 << 15, max_object_size=1 << 12) as (writer, (reader,)):
        value = bytes(range(256)) * 8
        places = [writer.put(n, value) for n in range(8)]
        wrong: list[object] = []

        def read(first: int) -> None:
            for n in range(300):
                place = places[(first + n) % 8]
                with reader.view(*place) as view:
                    if reader.get(*place) != value or bytes(view) != value:
                        wrong.append(place)
                del view

        threads = [threading.Thread(target=read, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        facts = writer.statistics().readers[0]
        assert (facts.views, facts.outstanding) == (0, 0)
        assert len(fill(writer, value, "more")) > 8


def test_a_key_that_leads_back_to_its_storage() -> None:
    """The reference cycle is found and freed, and the segment with it."""
    before = segments()

    class Key:
        storage: Storage | None = None

    key = Key()
    key.storage = Storage(64, 1, Ring(640, create=True), BytesSerde)
    key.storage.put(key, b"value")
    del key
    gc.collect()
    assert segments() == before
