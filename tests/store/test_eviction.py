"""Eviction: which objects may go, in which order, and the error of a full storage."""

import threading
import time

import pytest

from memlane import StoreBlocker, StoreFull, StoreReaderStatistics
from tests.support import PATIENCE
from tests.support.queues import refuses
from tests.support.stores import Ring, Storage, fill, store_of

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

# 52 bytes and 12 more are one place of 64.
ONE = bytes(52)


def test_the_oldest_goes_first() -> None:
    """Objects that every reader has read are evicted, up to 2 x max_object_size at once."""
    with store_of(size=640, max_object_size=64) as (writer, (reader,)):
        places = fill(writer, ONE)
        assert len(places) == 10
        for place in places[:7]:
            reader.get(*place)
        writer.put("new", ONE)
        assert list(writer.key_index) == ["2", "3", "4", "5", "6", "7", "8", "9", "new"]
        assert set(writer.id_index) == set(writer.writer_flag) == set(range(2, 11))
        with refuses(ValueError):
            reader.get(*places[0])
        assert reader.get(*places[2]) == ONE


def test_only_what_all_have_read() -> None:
    """One reader that has not read keeps the object and all newer ones."""
    with store_of(2, size=640, max_object_size=64) as (writer, (one, two)):
        places = fill(writer, ONE)
        for place in places:
            one.get(*place)
        for place in places[1:]:
            two.get(*place)
        with refuses(MemoryError):
            writer.put("new", ONE)
        writer.free_unused()
        assert len(writer.key_index) == 10
        two.get(*places[0])
        writer.free_unused()
        assert next(iter(writer.key_index)) == "2"
        writer.put("new", ONE)


def test_surplus_reads_do_not_count_for_others() -> None:
    """However often one reader reads, the other's read is still outstanding."""
    with store_of(2, size=640, max_object_size=64) as (writer, (one, two)):
        places = fill(writer, ONE)
        for _ in range(5):
            for place in places:
                one.get(*place)
        with refuses(MemoryError) as caught:
            writer.put("new", ONE)
        (blocker,) = caught.value.readers
        assert (blocker.rank, blocker.owes) == (1, 1)
        two.get(*places[0])
        writer.put("new", ONE)


def test_readers_owe_a_read_for_each_reference() -> None:
    """Every reader is to read as often as the object was referenced."""
    with store_of(2, size=640, max_object_size=64) as (writer, readers):
        places = fill(writer, ONE)
        assert writer.get_cached("0") == places[0]
        assert writer.get_cached("0") == places[0]
        assert writer.writer_flag[0] == 3
        for times in range(3):
            for reader in readers:
                with refuses(MemoryError) as caught:
                    writer.put("new", ONE)
                assert max(blocker.owes for blocker in caught.value.readers) == 3 - times
                reader.get(*places[0])
        writer.put("new", ONE)
        assert not writer.is_cached("0")


def test_sg_one_reference_too_many_is_refused() -> None:
    """SG: up to 2**31 - 1 references are counted; one more is refused and changes nothing."""
    with store_of() as (writer, (reader,)):
        place = writer.put("k", ONE)
        writer.writer_flag[0] = 2**31 - 2
        assert writer.get_cached("k") == place
        assert writer.statistics().readers[0].outstanding == 2**31 - 1
        with refuses(ValueError, match="references"):
            writer.get_cached("k")
        assert writer.writer_flag[0] == 2**31 - 1
        reader.get(*place)
        assert writer.statistics().readers[0].outstanding == 2**31 - 2
        with writer.ring_buffer.access_buf(place[0]) as (data, _):
            data[:4] = writer.ring_buffer.int2byte(2**31 - 1)
            reader.get(*place)
            assert writer.ring_buffer.byte2int(data[:4]) == 2**31 - 1  # it stays: no overflow
        assert writer.statistics().readers[0].outstanding == 2**31 - 3


def test_a_touched_object_stays() -> None:
    """A touched object stays until its next get_cached, or release_touches()."""
    with store_of(size=640, max_object_size=64) as (writer, (reader,)):
        places = fill(writer, ONE)
        for place in places:
            reader.get(*place)
        writer.touch("0")
        with refuses(MemoryError, match=r"'0', is pinned by touch\(\)") as caught:
            writer.put("new", ONE)
        assert caught.value.readers == ()
        assert list(writer.ring_buffer.free_buf(lambda *_: True)) == []
        writer.get_cached("0")
        with refuses(MemoryError, match="has not read it"):
            writer.put("new", ONE)
        reader.get(*places[0])
        writer.touch("0")
        writer.release_touches()
        writer.put("new", ONE)
        assert not writer.is_cached("0")


def test_a_full_table_evicts_like_a_full_ring() -> None:
    """`max_objects` objects at most: a full table evicts like a full ring."""
    with store_of(max_objects=5) as (writer, (reader,)):
        places = fill(writer, ONE)
        assert len(places) == 5
        with refuses(MemoryError, match="has not read it yet"):
            writer.put("new", ONE)
        reader.get(*places[0])
        writer.put("new", ONE)
        assert list(writer.key_index) == ["1", "2", "3", "4", "new"]


def test_a_fragmented_ring_evicts_while_that_may_help() -> None:
    """It keeps evicting while that may help: 2 x max_object_size need not be contiguous."""
    with store_of(size=200, max_object_size=60) as (writer, (reader,)):
        for n in range(3):
            reader.get(*writer.put(n, b""))
        for n in range(20):
            reader.get(*writer.put(f"large {n}", bytes(56)))
            reader.get(*writer.put(f"small {n}", b""))


def test_nothing_is_evicted_while_it_is_read() -> None:
    """An object that is being read keeps its place, though all have read it."""
    with store_of(size=640, max_object_size=64) as (writer, (reader,)):
        places = fill(writer, ONE)
        for place in places:
            reader.get(*place)
        with reader.view(*places[0]) as view:
            with refuses(MemoryError, match="reads it or holds a view of it") as caught:
                writer.put("new", ONE)
            assert [b.pins for b in caught.value.readers] == [1]
            assert list(writer.ring_buffer.free_buf(lambda *_: True)) == []
            assert bytes(view) == ONE
        del view
        writer.put("new", ONE)
        with writer.view(*places[2]), refuses(MemoryError, match="the writer itself"):
            fill_one_more(writer)


def fill_one_more(writer: Storage) -> None:
    for n in range(20):
        writer.put(f"more {n}", ONE)


def test_what_the_error_says() -> None:
    """Key and size; for the oldest object, who has not read it, since when, in what state."""
    began = time.monotonic() - 0.02  # its clock ticks every 1 to 10 ms
    with store_of(2, size=640, max_object_size=64, attached=1) as (writer, (reader,)):
        places = fill(writer, ONE)
        with refuses(MemoryError) as caught:
            writer.put("new", ONE)
        error = caught.value
        assert isinstance(error, StoreFull)
        assert (error.key, error.need, error.kept) == ("new", 56, "0")
        two, one = error.readers
        assert isinstance(one, StoreBlocker)
        assert (one.rank, one.state, one.owes, one.pins) == (0, "running", 1, 0)
        assert one.last_progress is not None
        assert began <= one.last_progress <= time.monotonic()
        assert two == StoreBlocker(1, None, "absent", 1, 0, None)
        assert f"reader 0 (pid {one.pid} python" in str(error)
        assert "reader 1 (never attached, has not read it yet)" in str(error)
        reader.get(*places[0])
        with refuses(MemoryError) as caught:
            writer.put("new", ONE)
        assert [blocker.rank for blocker in caught.value.readers] == [1]


def test_allocations_of_others_are_not_freed() -> None:
    """Allocations made in the ring by hand are not freed by the storage."""
    with store_of(size=640, max_object_size=64) as (writer, (reader,)):
        writer.ring_buffer.allocate_buf(56)
        for place in fill(writer, ONE):
            reader.get(*place)
        with refuses(MemoryError, match="not the storage's own"):
            writer.put("new", ONE)
        assert writer.ring_buffer.free_buf(lambda number, _: number == 0) == [0]
        reader.get(*writer.put("new", ONE))


def test_allocations_of_others_that_are_not_aligned() -> None:
    """They shift objects, which still work."""
    with store_of(size=640, max_object_size=64) as (writer, (reader,)):
        writer.ring_buffer.allocate_buf(3)
        place = writer.put("k", ONE)
        assert place[0] == 11
        assert reader.get(*place) == ONE
        with writer.ring_buffer.access_buf(place[0]) as (data, _):
            assert bytes(data[:4]) == b"\1\0\0\0"


def test_ids_that_others_use_up_are_skipped() -> None:
    """With a table of four entries, ids whose entry is taken are skipped."""
    with store_of(max_objects=4) as (writer, (reader,)):
        place = writer.put("oldest", ONE)
        for _ in range(3):
            writer.ring_buffer.allocate_buf(8)
        later = writer.put("new", ONE)
        assert later[1] == 5
        assert reader.get(*place) == reader.get(*later) == ONE


def test_objects_of_a_ring_freed_by_hand_are_refused() -> None:
    """The storage is told: its indexes follow, and readers are refused the freed objects."""
    with store_of() as (writer, (reader,)):
        places = [writer.put(n, ONE) for n in range(4)]
        assert list(writer.ring_buffer.free_buf(lambda *_: True, 100)) == [0, 1]
        assert list(writer.key_index) == [2, 3]
        with refuses(ValueError):
            reader.get(*places[0])
        writer.ring_buffer.clear()
        assert (writer.key_index, writer.writer_flag) == ({}, {})
        assert reader.get(*places[3]) == ONE


def test_clear_steps_over_objects_that_are_read() -> None:
    """Objects being read are stepped over; others go when their space is used."""
    with store_of(size=640, max_object_size=64) as (writer, (reader,)):
        places = [writer.put(n, bytes([n]) * 52) for n in range(10)]
        with reader.view(*places[1]) as view:
            writer.clear()
            assert writer.ring_buffer.data_buffer_end == 0
            assert [reader.get(*place)[0] for place in places] == list(range(10))
            assert writer.put("before it", ONE)[0] == 0
            assert writer.put("behind it", ONE)[0] == 128
            for gone in (0, 2):
                with refuses(ValueError, match="has been modified or is invalid"):
                    reader.get(*places[gone])
            assert reader.get(*places[3]) == bytes([3]) * 52
            assert bytes(view) == bytes([1]) * 52
        del view
        assert writer.statistics().objects == 2


def test_what_was_cleared_owes_nothing() -> None:
    """Its reads are not waited for, and it does not count as stored."""
    with store_of(2, size=640, max_object_size=64) as (writer, _):
        fill(writer, ONE)
        writer.clear()
        seen = writer.statistics()
        assert (seen.objects, seen.bytes, seen.evictions) == (0, 0, 0)
        assert [reader.outstanding for reader in seen.readers] == [0, 0]
        assert len(fill(writer, ONE)) == 10


def test_an_object_too_large_to_step_over_what_is_read() -> None:
    """The error names the reader; when its read ends, there is room."""
    with store_of(size=640, max_object_size=640) as (writer, (reader,)):
        places = [writer.put(n, ONE) for n in range(3)]
        with reader.view(*places[1]) as view:
            writer.clear()
            with refuses(MemoryError, match="cleared data is kept by reader 0") as caught:
                writer.put("large", bytes(570))
            assert [blocker.pins for blocker in caught.value.readers] == [1]
            assert writer.put("fits behind it", bytes(500)) == (128, 3)
        del view
        writer.clear()
        assert writer.put("large", bytes(570)) == (0, 4)


@pytest.mark.parametrize("kept", range(10))
def test_an_empty_ring_finds_room_on_both_sides_of_what_is_read(kept: int) -> None:
    """Wherever the ring's positions are."""
    with store_of(size=640, max_object_size=640) as (writer, (reader,)):
        places = [writer.put(n, b"x" * 52) for n in range(10)]
        with reader.view(*places[kept]) as view:
            writer.clear()
            for n in range(9):
                reader.get(*writer.put(n, ONE))
            while writer.key_index:
                writer.free_unused()
            room = 64 * max(kept, 9 - kept)
            address, _ = writer.put("large", bytes(room - 12))
            assert address % 640 in (0, 64 * (kept + 1))
            assert bytes(view) == b"x" * 52
        del view


def test_puts_go_on_beside_a_view_of_what_was_cleared() -> None:
    """Ids that would need its table entry are skipped each time they come round."""
    with store_of(size=640, max_object_size=64, max_objects=2) as (writer, (reader,)):
        place = writer.put("first", ONE)
        with reader.view(*place) as view:
            writer.clear()
            for n in range(50):
                reader.get(*writer.put(n, bytes([n]) * 52))
                assert list(writer.key_index) == [n]
            assert bytes(view) == ONE
        del view
        writer.put("two at once", ONE)
        assert len(writer.key_index) == 2


def test_a_table_of_nothing_but_what_is_read() -> None:
    """The error names the readers; nothing stored is evicted in vain."""
    with store_of(size=640, max_object_size=64, max_objects=1) as (writer, (reader,)):
        with reader.view(*writer.put("first", ONE)) as view:
            writer.clear()
            with refuses(MemoryError, match="cleared data is kept by reader 0"):
                writer.put("second", ONE)
            assert bytes(view) == ONE
        del view
        writer.put("second", ONE)


def test_an_allocation_by_hand_beside_what_was_cleared() -> None:
    """The ring never hands out memory that is being read, whoever asks."""
    with store_of(size=640, max_object_size=64) as (writer, (reader,)):
        ring = writer.ring_buffer
        for n in range(2):
            place = writer.put(n, ONE)
        with reader.view(*place) as view:
            writer.clear()
            assert ring.allocate_buf(56) == (0, 2)
            with refuses(MemoryError, match="cleared data is still being read"):
                ring.allocate_buf(540)
            assert ring.allocate_buf(1) == (128, 3)
            assert bytes(view) == ONE
        del view
        with refuses(MemoryError, match="bytes are in use"):
            ring.allocate_buf(540)


def test_clear_in_the_middle_of_a_get() -> None:
    """A get during which clear() is called gives the right bytes."""
    decoding, cleared = threading.Event(), threading.Event()

    with store_of() as (writer, (reader,)):
        place = writer.put("k", ONE)
        inner = reader.ser_de.deserialize

        def slow(data: memoryview) -> object:
            decoding.set()
            cleared.wait(PATIENCE)
            return inner(data)

        reader.ser_de.deserialize = slow  # type: ignore[method-assign]
        outcome: list[object] = []

        def get() -> None:
            try:
                outcome.append(reader.get(*place))
            except ValueError as error:
                outcome.append(error)

        thread = threading.Thread(target=get)
        thread.start()
        decoding.wait(PATIENCE)
        writer.clear()
        cleared.set()
        thread.join()
        assert outcome == [ONE]


@pytest.mark.parametrize("attached", [0, 1, 2])
def test_a_lock_makes_the_writer_stand_in(attached: int) -> None:
    """With a reader_lock, the writer's get counts as an outstanding read of a reader."""
    with store_of(2, size=640, max_object_size=64, attached=0, reader_lock=object()) as (writer, _):
        places = fill(writer, ONE)
        readers = [
            Storage(64, 2, Ring(*writer.ring_buffer.handle()), writer.serde_class)
            for _ in range(attached)
        ]
        for _ in range(2 - attached):
            with refuses(MemoryError):
                writer.put("new", ONE)
            writer.get(*places[0])
        for reader in readers:
            with refuses(MemoryError):
                writer.put("new", ONE)
            reader.get(*places[0])
        writer.put("new", ONE)
        for reader in readers:
            reader.close()


def test_standing_in_does_not_pay_twice() -> None:
    """Reads that were not outstanding do not count for a later reference."""
    with store_of(1, reader_lock=object(), size=640, max_object_size=64) as (writer, (reader,)):
        places = fill(writer, ONE)
        writer.get(*places[0])
        reader.get(*places[0])
        for _ in range(3):
            writer.get(*places[0])
        writer.get_cached("0")
        with refuses(MemoryError):
            writer.put("new", ONE)
        writer.get(*places[0])
        writer.put("new", ONE)


def test_without_a_lock_the_writer_does_not_count() -> None:
    with store_of(1, size=640, max_object_size=64) as (writer, (reader,)):
        places = fill(writer, ONE)
        for _ in range(3):
            writer.get(*places[0])
        with refuses(MemoryError):
            writer.put("new", ONE)
        reader.get(*places[0])
        writer.put("new", ONE)


def test_statistics_count_what_each_reader_owes() -> None:
    """Counters, and for each reader its outstanding reads."""
    with store_of(2, size=640, max_object_size=64, attached=1) as (writer, (reader,)):
        places = fill(writer, ONE)
        writer.get_cached("9")
        for place in places[:3]:
            reader.get(*place)
        for end in (writer, reader):
            seen = end.statistics()
            assert (seen.puts, seen.hits, seen.evictions, seen.objects) == (10, 1, 0, 10)
            assert seen.bytes == 560
            assert (seen.writer_state, seen.writer_pid) == ("running", seen.pid)
            one, two = seen.readers
            assert (one.rank, one.state, one.reads, one.outstanding) == (0, "running", 3, 8)
            assert two == StoreReaderStatistics(1, None, "absent", 0, 11, None, 0, None)
        assert (writer.statistics().role, writer.statistics().rank) == ("writer", None)
        assert (reader.statistics().role, reader.statistics().rank) == ("reader", 0)
        with reader.view(*places[0]):
            seen = writer.statistics()
            assert seen.readers[0].views == 1
            assert seen.readers[0].views_since is not None
        reader.close()
        assert writer.statistics().readers[0].state == "closed"
        assert writer.statistics().readers[0].outstanding == 0
