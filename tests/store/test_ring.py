"""SingleWriterShmRingBuffer: the documented arithmetic, allocation format and limits."""

import os
import struct
from typing import Any

import pytest

from memlane import (
    Closed,
    ConcurrentUse,
    LayoutMismatch,
    SegmentExists,
    SegmentMissing,
    StoreFull,
    WrongRole,
)
from tests.support.queues import SHM, refuses, segments
from tests.support.stores import Ring, ring_of_bytes

pytestmark = [pytest.mark.wheel, pytest.mark.unit]


def anything(_id: int, _view: memoryview) -> bool:
    return True


def test_a_ring_allocates_as_in_the_worked_example() -> None:
    """A ring of 100 bytes, step by step."""
    with ring_of_bytes(100) as ring:
        assert ring.allocate_buf(20) == (0, 0)
        assert ring.allocate_buf(30) == (28, 1)
        assert ring.data_buffer_end == 66
        assert list(ring.free_buf(lambda number, _: number == 0)) == [0]
        assert (ring.data_buffer_start, ring.data_buffer_end) == (28, 66)
        assert list(ring.free_buf(anything)) == [1]
        assert (ring.data_buffer_start, ring.data_buffer_end) == (66, 66)
        assert ring.allocate_buf(40) == (100, 2)
        assert (ring.data_buffer_start, ring.data_buffer_end) == (66, 148)
        with refuses(MemoryError, match=r"Not enough space in the data buffer.*free_buf\(\)") as e:
            ring.allocate_buf(20)
        assert isinstance(e.value, StoreFull)
        assert e.value.need == 28
        assert (ring.data_buffer_start, ring.data_buffer_end) == (66, 148)
        assert ring.metadata == {2: 100}
        assert list(ring.free_buf(anything)) == [2]
        assert (ring.data_buffer_start, ring.data_buffer_end) == (48, 48)


def test_s1_the_whole_ring_can_be_allocated() -> None:
    """S1: once everything is freed the whole ring can be allocated, wherever its positions are."""
    with ring_of_bytes(200) as ring:
        ring.allocate_buf(100)
        ring.free_buf(anything)
        address, number = ring.allocate_buf(192)
        with ring.access_buf(address) as (data, what):
            assert len(data) == 192
            assert what == (number, 200)


@pytest.mark.parametrize("first", range(1, 92, 7))
def test_the_whole_ring_can_be_allocated_from_anywhere(first: int) -> None:
    """The same from every position, several times around."""
    with ring_of_bytes(100) as ring:
        for _ in range(5):
            ring.allocate_buf(first)
            ring.free_buf(anything)
            address, _ = ring.allocate_buf(92)
            assert 0 <= address < 200
            with refuses(MemoryError):
                ring.allocate_buf(1)
            ring.free_buf(anything)


def test_s2_freeing_nothing_changes_nothing() -> None:
    """S2: on a fresh or emptied ring nothing is called and nothing changes."""

    def never(_id: int, _view: memoryview) -> bool:
        raise AssertionError("there is no allocation to ask about")

    with ring_of_bytes(100) as ring:
        for _ in range(2):
            before = (ring.data_buffer_start, ring.data_buffer_end, ring.monotonic_id_start)
            assert list(ring.free_buf(never)) == []
            assert before == (ring.data_buffer_start, ring.data_buffer_end, ring.monotonic_id_start)
            ring.allocate_buf(30)
            ring.free_buf(anything)


def test_a_fresh_ring_is_empty() -> None:
    """Ids and positions start at 0, and nothing is there."""
    with ring_of_bytes(100) as ring:
        assert (ring.monotonic_id_start, ring.monotonic_id_end) == (0, 0)
        assert (ring.data_buffer_start, ring.data_buffer_end) == (0, 0)
        assert ring.metadata == {}
        assert ring.is_writer
        assert ring.data_buffer_size == 100
        assert (ring.ID_NBYTES, ring.ID_MAX, ring.SIZE_NBYTES, ring.MD_SIZE) == (4, 2**31, 4, 8)


def test_an_allocation_lies_behind_its_id_and_size() -> None:
    """Id and size lie before the data, little-endian and signed, at offset 0 of the file."""
    with ring_of_bytes(100) as ring:
        ring.allocate_buf(10)
        address, number = ring.allocate_buf(20)
        with ring.access_buf(address) as (data, what):
            data[:] = bytes(range(20))
            assert what == (number, 28)
        file = (SHM / ring.handle()[1]).read_bytes()
        assert file[address : address + 28] == struct.pack("<ii", 1, 28) + bytes(range(20))
        assert bytes(ring.shared_memory.buf[:100]) == file[:100]
        assert ring.shared_memory.name == ring.handle()[1]
        assert ring.shared_memory.size == len(file)


def test_numbers_are_four_bytes_and_signed() -> None:
    """int2byte and byte2int are 4 bytes, little-endian and signed."""
    with ring_of_bytes(100) as ring:
        for number in (0, 1, -1, 2**31 - 1, -(2**31)):
            assert ring.int2byte(number) == struct.pack("<i", number)
            assert ring.byte2int(ring.int2byte(number)) == number
            assert ring.byte2int(memoryview(ring.int2byte(number))) == number


@pytest.mark.parametrize("size", [0, -1, -(2**40)])
def test_an_allocation_has_at_least_one_byte(size: int) -> None:
    """An allocation has at least one byte of data."""
    with ring_of_bytes(100) as ring:
        with refuses(ValueError):
            ring.allocate_buf(size)
        assert ring.metadata == {}


@pytest.mark.parametrize("size", [93, 100, 2**31 - 9, 2**31 - 8, 2**31, 2**40, 2**100])
def test_allocations_beyond_the_ring_are_refused(size: int) -> None:
    """SG: whatever does not fit is refused, and nothing overflows."""
    with ring_of_bytes(100) as ring:
        with refuses(MemoryError):
            ring.allocate_buf(size)
        assert ring.metadata == {}
        assert ring.allocate_buf(92) == (0, 0)


def test_sg_allocations_that_four_bytes_cannot_tell() -> None:
    """SG: an allocation of 2 GiB is refused even if the ring has room for it."""
    with ring_of_bytes(100) as ring:
        ring.data_buffer_size = 1 << 32  # as if; nothing is allocated
        for size in (2**31 - 8, 2**31, 2**32 - 8):
            with refuses(ValueError, match=r"below 2\*\*31"):
                ring.allocate_buf(size)
        assert ring.metadata == {}


def test_freeing_stops_once_enough_is_free() -> None:
    """Whole allocations with their header count; it stops once enough is freed."""
    with ring_of_bytes(1000) as ring:
        for _ in range(10):
            ring.allocate_buf(42)
        assert list(ring.free_buf(anything, 0)) == []
        assert list(ring.free_buf(anything, -5)) == []
        assert list(ring.free_buf(anything, 1)) == [0]
        assert list(ring.free_buf(anything, 50)) == [1]
        freed = ring.free_buf(anything, 51)
        assert (freed[0], freed[1], len(freed)) == (2, 3, 2)
        assert list(ring.free_buf(lambda number, _: number < 6)) == [4, 5]
        assert ring.metadata == {6: 300, 7: 350, 8: 400, 9: 450}


def test_what_is_asked_about() -> None:
    """The predicate sees the id, and the data of that allocation."""
    seen = []

    def look(number: int, view: memoryview) -> bool:
        seen.append((number, bytes(view)))
        return number < 1

    with ring_of_bytes(100) as ring:
        for letter in b"ab":
            with ring.access_buf(ring.allocate_buf(3)[0]) as (data, _):
                data[:] = bytes([letter] * 3)
        ring.free_buf(look)
    assert seen == [(0, b"aaa"), (1, b"bbb")]


def test_a_predicate_that_raises() -> None:
    """The space that it allowed before is freed, and the ring still works."""

    def fails(number: int, _view: memoryview) -> bool:
        if number == 1:
            raise ZeroDivisionError
        return True

    with ring_of_bytes(100) as ring:
        ring.allocate_buf(20)
        ring.allocate_buf(20)
        with pytest.raises(ZeroDivisionError):
            ring.free_buf(fails)
        assert ring.metadata == {1: 28}
        assert ring.allocate_buf(20) == (56, 2)


def test_a_predicate_may_read_the_ring_and_not_change_it() -> None:
    """Changing the ring from within is refused; reading is not."""

    def meddles(_id: int, _view: memoryview) -> bool:
        with ring.access_buf(0) as (data, _):
            assert len(data) == 20
        for call in (ring.clear, lambda: ring.allocate_buf(1), lambda: ring.free_buf(anything)):
            with refuses(ConcurrentUse):
                call()
        return True

    with ring_of_bytes(100) as ring:
        ring.allocate_buf(20)
        assert list(ring.free_buf(meddles)) == [0]


def test_ids_wrap_to_zero() -> None:
    """After 2**31 - 1 comes 0, and freeing goes on across it."""
    with ring_of_bytes(1000) as ring:
        ring.monotonic_id_start = ring.monotonic_id_end = 2**31 - 2
        assert [ring.allocate_buf(20)[1] for _ in range(4)] == [2**31 - 2, 2**31 - 1, 0, 1]
        with ring.access_buf(56) as (_, what):
            assert what == (0, 28)
        with refuses(ValueError):
            ring.monotonic_id_end = 7
        freed = ring.free_buf(lambda number, _: number != 1)
        assert (freed[0], freed[2], len(freed)) == (2**31 - 2, 0, 3)
        assert (ring.monotonic_id_start, ring.monotonic_id_end) == (1, 2)


def test_allocations_are_freed_if_only_the_next_id_was_set() -> None:
    """Allocations can be freed even if only the next id was set."""
    with ring_of_bytes(100) as ring:
        ring.monotonic_id_end = 50
        assert ring.allocate_buf(20)[1] == 50
        assert list(ring.free_buf(anything)) == [50]


@pytest.mark.parametrize("value", [-1, 2**31, 2**40, "0", 1.0])
def test_ids_that_cannot_be(value: Any) -> None:
    with ring_of_bytes(100) as ring:
        with refuses(ValueError, TypeError):
            ring.monotonic_id_start = value
        with refuses(ValueError, TypeError):
            ring.monotonic_id_end = value


def test_a_clear_forgets_allocations_and_ids_go_on() -> None:
    """All allocations are forgotten, positions are 0, ids continue."""
    with ring_of_bytes(100) as ring:
        ring.allocate_buf(20)
        ring.allocate_buf(30)
        ring.clear()
        assert ring.metadata == {}
        assert (ring.data_buffer_start, ring.data_buffer_end) == (0, 0)
        assert (ring.monotonic_id_start, ring.monotonic_id_end) == (2, 2)
        assert ring.allocate_buf(20) == (0, 2)


@pytest.mark.parametrize("address", [-1, 200, 2**31, 2**63, 2**64, 2**100, 93, 193, 99, 50])
def test_addresses_of_nothing_are_refused(address: int) -> None:
    """Outside the range, too near the end for a header, or no allocation: refused."""
    with ring_of_bytes(100) as ring:
        ring.allocate_buf(20)
        with refuses(ValueError), ring.access_buf(address):
            pass


@pytest.mark.parametrize("size", [-(2**31), -1, 0, 8, 101, 2**31 - 1])
def test_headers_that_lie_are_refused(size: int) -> None:
    """An allocation that would exceed the ring is refused, whatever its header says."""
    with ring_of_bytes(100) as ring:
        ring.allocate_buf(20)
        with ring.access_buf(0):
            ring.shared_memory.buf[4:8] = struct.pack("<i", size)
        with refuses(ValueError), ring.access_buf(0):
            pass
        assert list(ring.free_buf(anything)) == [0]  # the writer believes its own books


def test_old_addresses_stay_valid() -> None:
    """An address from before start and end moved back by one ring still finds its allocation."""
    with ring_of_bytes(100) as ring:
        ring.allocate_buf(60)
        ring.free_buf(anything)
        address, number = ring.allocate_buf(40)  # 100: the next lap
        ring.allocate_buf(8)
        assert address == 100
        assert list(ring.free_buf(lambda number, _: False)) == []
        with ring.access_buf(address) as (data, _):
            data[:4] = b"here"
        ring.free_buf(anything, 1)
        assert ring.data_buffer_start < 100
        with ring.access_buf(address) as (data, what):
            assert bytes(data[:4]) == b"here"
            assert what == (number, 48)


def test_attached_rings_cannot_allocate_or_free() -> None:
    """They see and write the same bytes, but only the creator allocates and frees."""
    with ring_of_bytes(100) as ring:
        address, number = ring.allocate_buf(20)
        with ring.access_buf(address) as (data, _):
            data[:2] = b"ok"
        size, name = ring.handle()
        other = Ring(size, name)
        assert not other.is_writer
        assert other.metadata == {}
        assert other.handle() == ring.handle()
        with other.access_buf(address) as (data, what):
            assert bytes(data[:2]) == b"ok"
            assert what == (number, 28)
            data[:2] = b"OK"
        with ring.access_buf(address) as (data, _):
            assert bytes(data[:2]) == b"OK"
        for call in (other.clear, lambda: other.allocate_buf(1), lambda: other.free_buf(anything)):
            with refuses(WrongRole, match="Only the writer can"):
                call()
        other.close()
        assert (SHM / name).exists()


@pytest.mark.parametrize("size", [99, 101, 5000, 1 << 20])
def test_attaching_with_another_size_is_refused(size: int) -> None:
    """The error states both sizes."""
    with ring_of_bytes(100) as ring, refuses(ValueError, match=rf"\(100, .*\({size}, ") as caught:
        Ring(size, ring.handle()[1])
    assert isinstance(caught.value, LayoutMismatch)


def test_a_given_name_is_used_as_it_is() -> None:
    """A given name is used as it is; one in use is refused, and left alone."""
    name = f"memlane-test-{os.getpid()}"
    ring = Ring(100, name, create=True)
    try:
        assert ring.handle() == (100, name)
        ring.allocate_buf(20)
        with refuses(FileExistsError, match=name) as caught:
            Ring(50, name, create=True)
        assert isinstance(caught.value, SegmentExists)
        assert caught.value.name == name
        with ring.access_buf(0) as (data, _):
            assert len(data) == 20
    finally:
        ring.close()
    assert name not in segments()
    Ring(100, name, create=True).close()
    assert name not in segments()


def test_a_name_that_is_somebody_elses() -> None:
    """A file that is not a segment is never removed, though no process holds it."""
    name = f"memlane-test-{os.getpid()}"
    (SHM / name).write_bytes(b"mine")
    try:
        with refuses(FileExistsError):
            Ring(100, name, create=True)
        assert (SHM / name).read_bytes() == b"mine"
    finally:
        (SHM / name).unlink()


@pytest.mark.parametrize("size", [0, -1, 1 << 62, 1 << 64, 1.5, None, "100", True])
def test_sizes_that_cannot_be(size: Any) -> None:
    before = segments()
    with refuses(ValueError, TypeError):
        Ring(size, create=True)
    assert segments() == before


def test_attaching_to_nothing_is_refused() -> None:
    with refuses(ValueError, match="name"):
        Ring(100)
    with refuses(FileNotFoundError) as caught:
        Ring(100, "memlane-nobody")
    assert isinstance(caught.value, SegmentMissing)
    with refuses(ValueError):
        Ring(100, "../x", create=True)


def test_closing_is_final_and_views_stay_readable() -> None:
    """Idempotent and final; views stay readable."""
    ring = Ring(100, create=True)
    address, _ = ring.allocate_buf(20)
    other = Ring(*ring.handle())
    with other.access_buf(address) as (data, _):
        data[:2] = b"ok"
        ring.close()
        ring.close()
        other.close()
        assert bytes(data[:2]) == b"ok"
    for call in (ring.clear, lambda: ring.allocate_buf(1), lambda: ring.free_buf(anything)):
        with refuses(Closed):
            call()
    with refuses(Closed), other.access_buf(address):
        pass
    with refuses(Closed), ring:
        pass
    with refuses(Closed):
        _ = ring.shared_memory
    assert ring.handle()[1] not in segments()
    with Ring(100, create=True) as ring:
        assert ring.handle()[1] in segments()
    assert ring.handle()[1] not in segments()
