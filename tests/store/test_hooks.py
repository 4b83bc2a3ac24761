"""The steps of put and get that subclasses call and override."""

import gc
from typing import Any

import pytest

from tests.support.queues import refuses
from tests.support.stores import BytesSerde, Ring, Storage, fill, store_of

pytestmark = pytest.mark.unit

ONE = bytes(52)


def test_copy_to_buffer_skips_the_count_and_writes_the_rest() -> None:
    """It skips the 4 count bytes, then writes metadata, then data."""
    with store_of() as (writer, _):
        for data in (b"data", [b"da", bytearray(b"t"), memoryview(b"a")]):
            target = bytearray(b"." * 12)
            writer.copy_to_buffer(data, 4, b"meta", 4, memoryview(target))
            assert target == b"....metadata"
        for data in ("data", 1, None, (b"data",), bytearray(b"data")):
            with refuses(ValueError, match="Unsupported data type"):
                writer.copy_to_buffer(data, 4, b"meta", 4, memoryview(bytearray(12)))
        for data_bytes, md_bytes, room in (
            (3, 4, 12),
            (4, 3, 12),
            (4, 4, 11),
            (4, 4, 3),
            (5, 4, 12),
        ):
            with refuses(ValueError):
                writer.copy_to_buffer(
                    b"data", data_bytes, b"meta", md_bytes, memoryview(bytearray(room))
                )
        with refuses(ValueError, match="written"):
            writer.copy_to_buffer(b"data", 4, b"meta", 4, memoryview(bytes(12)))


def test_increment_reader_flag_counts_one_more_read() -> None:
    """One more read, counted in the view; the table follows if it has the object."""
    with store_of(2) as (writer, (one, two)):
        place = writer.put("k", ONE)
        for reader, count in ((one, 1), (one, 1), (two, 2)):
            with reader.ring_buffer.access_buf(place[0]) as (data, _):
                reader.increment_reader_flag(data[:4])
                assert reader.ring_buffer.byte2int(data[:4]) == count
        with writer.ring_buffer.access_buf(place[0]) as (data, _):
            assert writer.default_is_free_check(place[1], data)
        foreign = bytearray(8)
        one.increment_reader_flag(memoryview(foreign)[:4])
        one.increment_reader_flag(memoryview(foreign)[1:5])
        assert foreign == b"\1\1\0\0\0\0\0\0"
        full = bytearray(writer.ring_buffer.int2byte(2**31 - 1))
        one.increment_reader_flag(memoryview(full))
        assert one.ring_buffer.byte2int(bytes(full)) == 2**31 - 1
        for view in (memoryview(bytearray(3)), memoryview(bytes(4))):
            with refuses(ValueError):
                one.increment_reader_flag(view)


def test_the_writers_increments_stand_in() -> None:
    """The writer can count reads for its readers by hand."""
    with store_of(2, attached=0) as (writer, _):
        place = writer.put("k", ONE)
        with writer.ring_buffer.access_buf(place[0]) as (data, _):
            for count in (1, 2):
                assert not writer.default_is_free_check(place[1], data)
                writer.increment_reader_flag(data[:4])
                assert writer.ring_buffer.byte2int(data[:4]) == count
            assert writer.default_is_free_check(place[1], data)
            writer.increment_writer_flag(place[1])
            assert writer.writer_flag[place[1]] == 2
            assert not writer.default_is_free_check(place[1], data)


def test_is_free_of_foreign_bytes() -> None:
    """For bytes not in the table, the count in the bytes decides."""
    with store_of(2) as (writer, _):
        place = writer.put("k", ONE)
        number = place[1]
        for count, is_free in ((0, False), (1, False), (2, True), (3, True), (-1, False)):
            view = memoryview(writer.ring_buffer.int2byte(count) + b"data")
            assert writer.default_is_free_check(number, view) is is_free
        writer.writer_flag[77] = 2
        for count, is_free in ((3, False), (4, True)):
            view = memoryview(writer.ring_buffer.int2byte(count))
            assert writer.default_is_free_check(77, view) is is_free
        assert not writer.default_is_free_check(78, memoryview(bytes(4)))


def test_closed_readers_count_as_done() -> None:
    with store_of(2) as (writer, (one, two)):
        place = writer.put("k", ONE)
        one.get(*place)
        with writer.ring_buffer.access_buf(place[0]) as (data, _):
            assert not writer.default_is_free_check(place[1], data)
            two.close()
            assert writer.default_is_free_check(place[1], data)


class Marked(Storage):
    """Overrides every step."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[str] = []
        self.fails = ""
        super().__init__(*args, **kwargs)

    def _note(self, step: str) -> None:
        self.calls.append(step)
        if self.fails == step:
            raise ZeroDivisionError(step)

    def copy_to_buffer(self, *args: Any) -> None:
        self._note("copy")
        super().copy_to_buffer(*args)

    def increment_writer_flag(self, id: int) -> None:
        self._note("reference")
        super().increment_writer_flag(id)

    def increment_reader_flag(self, data_view: memoryview) -> None:
        assert len(data_view) == 4
        self._note("read")
        super().increment_reader_flag(data_view)

    def default_is_free_check(self, id: int, buf: memoryview) -> bool:
        self._note("is free")
        return super().default_is_free_check(id, buf)


def test_steps_are_called() -> None:
    """put and get go through the subclass."""
    writer = Marked(64, 1, Ring(640, create=True), BytesSerde)
    reader = Marked(64, 1, Ring(*writer.ring_buffer.handle()), BytesSerde)
    with writer, reader:
        place = writer.put("k", ONE)
        assert writer.calls == ["copy", "reference"]
        reader.get(*place)
        with reader.view(*place):
            pass
        assert reader.calls == ["read", "read"]
        writer.get_cached("k")
        writer.free_unused()
        assert writer.calls == ["copy", "reference", "reference", "is free"]


@pytest.mark.parametrize("step", ["copy", "reference"])
def test_a_step_of_put_fails(step: str) -> None:
    """SC: its space is free again, nothing is stored, and the storage works."""
    writer = Marked(64, 1, Ring(640, create=True), BytesSerde)
    reader = Storage.create_from_handle(writer.handle())
    with writer, reader:
        for _ in range(30):
            writer.fails = step
            with pytest.raises(ZeroDivisionError):
                writer.put("k", ONE)
            assert (writer.key_index, writer.id_index, writer.writer_flag) == ({}, {}, {})
            assert writer.ring_buffer.metadata == {}
            assert writer.statistics().objects == 0
        with refuses(ValueError):
            reader.get(0, 0)
        writer.fails = ""
        place = writer.put("k", b"good")
        assert place == (0, 0)
        assert reader.get(*place) == b"good"


def test_a_step_of_get_fails() -> None:
    """Nothing stays pinned."""
    writer = Marked(64, 1, Ring(640, create=True), BytesSerde)
    reader = Marked(64, 1, Ring(*writer.ring_buffer.handle()), BytesSerde)
    with writer, reader:
        place = writer.put("k", ONE)
        reader.fails = "read"
        with pytest.raises(ZeroDivisionError):
            reader.get(*place)
        with pytest.raises(ZeroDivisionError), reader.view(*place):
            pass
        assert writer.statistics().readers[0].views == 0
        reader.fails = ""
        reader.get(*place)
        assert len(fill(writer, ONE)) == 10


def test_a_free_check_that_fails() -> None:
    """put raises its error, and the storage works."""
    writer = Marked(64, 1, Ring(640, create=True), BytesSerde)
    with writer:
        places = fill(writer, ONE)
        writer.fails = "is free"
        with pytest.raises(ZeroDivisionError):
            writer.put("new", ONE)
        assert len(places) == len(writer.key_index) == 10
        assert writer.get(*places[0]) == ONE


class Stingy(Storage):
    """Frees nothing."""

    def default_is_free_check(self, id: int, buf: memoryview) -> bool:
        return False


class Generous(Storage):
    """Frees whatever nobody is reading."""

    def default_is_free_check(self, id: int, buf: memoryview) -> bool:
        return True


def test_another_free_check_cannot_overrule_pins() -> None:
    """A subclass decides, but cannot overrule pins."""
    with Stingy(64, 1, Ring(640, create=True), BytesSerde, object()) as writer:
        for place in fill(writer, ONE):
            writer.get(*place)
        with refuses(MemoryError):
            writer.put("new", ONE)
    with Generous(64, 1, Ring(640, create=True), BytesSerde) as writer:
        for n in range(30):
            place = writer.put(n, ONE)
        with writer.view(*place) as view:
            for n in range(9):
                writer.put(f"more {n}", ONE)
            with refuses(MemoryError):
                writer.put("new", ONE)
            assert bytes(view) == ONE
        del view


def test_a_ring_that_outlives_its_storage() -> None:
    """The storage's knowledge goes with it; the ring can be used alone again."""
    ring = Ring(640, create=True)
    writer = Storage(64, 1, ring, BytesSerde)
    writer.put("k", ONE)
    del writer
    gc.collect()
    assert ring.free_buf(lambda *_: True) == [0]
    ring.allocate_buf(8)
    ring.clear()
    assert ring.allocate_buf(600) == (0, 2)
    ring.close()
