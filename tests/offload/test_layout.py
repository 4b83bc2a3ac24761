"""The bytes of a region: rows of cells, as seen by any process that maps the file."""

import os
import stat

import numpy as np
import pytest

from tests.support.missing import package
from tests.support.queues import refuses
from tests.support.regions import PAGE, mapped, new_id, path_of, region_of

pytestmark = pytest.mark.unit

torch = package("torch")

SHAPES = [(4, 2, PAGE), (3, 1, PAGE), (5, 3, 1000), (2, 4, 3 * PAGE), (7, 2, 1)]


@pytest.mark.parametrize(("blocks", "workers", "cell"), SHAPES)
def test_every_byte_is_where_the_layout_says(blocks: int, workers: int, cell: int) -> None:
    """Cell w of block b is at (b * workers + w) * its size; bytes behind are unused."""
    instance = new_id()
    shape = {"blocks": blocks, "workers": workers, "cell": cell, "extra": 77}
    expected = np.zeros(blocks * workers * cell + 77, np.uint8)
    regions = [region_of(instance, rank, **shape) for rank in range(workers)]
    for rank, region in enumerate(regions):
        sizes = [cell] if cell < 3 else [cell // 3, cell - cell // 3]
        before = 0
        for number, size in enumerate(sizes):
            view = region.create_next_view(size)
            assert (view.shape, view.stride()) == ((blocks, size), (workers * cell, 1))
            assert view.dtype == torch.int8
            for block in range(blocks):
                mark = 1 + (block * 31 + rank * 7 + number * 3) % 100
                view[block] = mark
                at = (block * workers + rank) * cell + before
                expected[at : at + size] = mark
            before += size
    with mapped(regions[0].mmap_path) as memory:
        assert len(memory) == len(expected)
        assert bytes(memory) == expected.tobytes()
    for region in regions:
        region.cleanup()


def test_the_file_has_its_name_size_and_mode() -> None:
    """The documented name, exact size, mode 0600, all its space reserved."""
    instance = new_id()
    with region_of(instance, extra=5) as region:
        facts = path_of(instance).stat()
        assert region.mmap_path == str(path_of(instance))
        assert facts.st_size == region.total_size_bytes == 8 * PAGE + 5
        assert stat.S_IMODE(facts.st_mode) == 0o600
        assert facts.st_blocks * 512 >= facts.st_size
        assert region.fd is not None
        assert os.path.samestat(os.fstat(region.fd), facts)


def test_directory_and_prefix_can_be_chosen(tmp_path: object) -> None:
    """Directory and prefix can be chosen."""
    instance = new_id()
    os.mkdir(directory := f"/dev/shm/memlane-{instance}")
    try:
        with region_of(instance, directory=directory, prefix="kv.") as region:
            assert region.mmap_path == f"{directory}/kv.{instance}.mmap"
            assert os.listdir(directory) == [f"kv.{instance}.mmap"]
        assert os.listdir(directory) == []
    finally:
        os.rmdir(directory)


def test_views_share_one_cursor() -> None:
    """torch and numpy views follow each other; what is refused does not move it."""
    with region_of(new_id(), 1) as region:
        start = region._worker_offset
        assert start == PAGE
        tensor = region.create_next_view(100)
        with refuses(ValueError, match="exceeds worker area end"):
            region.create_next_view(PAGE - 99)
        array = region.create_next_array(PAGE - 100)
        assert region._worker_offset == region._worker_area_end == 2 * PAGE
        with refuses(AssertionError):
            region.create_next_array(1)
        tensor[:] = 1
        array[:] = 2
        assert bytes(region.mmap_obj[start : start + 101]) == b"\1" * 100 + b"\2"
        assert array.base is not None
        assert array.strides == (2 * PAGE, 1)
        assert len(region._views) == 2


@pytest.mark.parametrize("size", [0, -1])
def test_views_of_nothing_are_refused(size: int) -> None:
    with region_of(new_id()) as region, refuses(ValueError):
        region.create_next_view(size)


def test_whole_has_no_cell() -> None:
    """A region without a rank refuses to make views, and says why."""
    with region_of(new_id(), None) as region:
        for make in (region.create_next_view, region.create_next_array):
            with refuses(ValueError, match="rank"):
                make(1)
            with refuses(AssertionError):
                make(1)


def test_views_are_handed_on_by_dlpack_without_a_copy() -> None:
    """Both kinds of views can be handed on without a copy."""
    with region_of(new_id()) as region:
        tensor, array = region.create_next_view(8), region.create_next_array(8)
        of_tensor, of_array = np.from_dlpack(tensor), torch.from_dlpack(array)
        of_tensor[2, 3] = 5
        of_array[1, 4] = 6
        assert tensor[2, 3] == 5
        assert array[1, 4] == 6


def test_the_base_is_the_whole_mapping() -> None:
    """The whole as one tensor of bytes, at the address of the mapping."""
    with region_of(new_id()) as region:
        view = region.create_next_view(16)
        base = region._base
        assert base is not None
        assert base is region._base
        assert (base.dtype, base.shape) == (torch.int8, (region.total_size_bytes,))
        assert view.data_ptr() == base.data_ptr()
        view[3, 15] = 9
        assert base[3 * 2 * PAGE + 15] == 9


@pytest.mark.parametrize("rank", [None, 0])
def test_a_row_is_the_writable_memory_of_a_block(rank: int | None) -> None:
    """`view[b]` is the writable row of block b; as a memoryview it has two dimensions."""
    with region_of(new_id(), rank, extra=3) as region:
        rows = region.create_kv_memoryview()
        assert (len(rows), rows.shape, rows.nbytes) == (4, (4, 2 * PAGE), 8 * PAGE)
        for block in range(4):
            rows[block][:] = bytes([block + 1]) * (2 * PAGE)
        assert [row[0] for row in rows] == [1, 2, 3, 4]
        assert rows[-1][0] == 4
        for beyond in (4, -5):
            with pytest.raises(IndexError):
                rows[beyond]
        plane = memoryview(rows)
        assert (plane.ndim, plane.shape, plane.format) == (2, (4, 2 * PAGE), "B")
        assert plane[2, 5] == 3
        plane[2, 5] = 9
        assert rows[2][5] == 9
        assert np.asarray(rows).sum() == sum(range(1, 5)) * 2 * PAGE + 6
        assert bytes(plane)[-1] == 4
        assert region.mmap_obj[8 * PAGE :] == b"\0" * 3


def test_map_is_like_mmap() -> None:
    """Length, bytes of slices, numbers of bytes, assignment, the buffer protocol, `closed`."""
    region = region_of(new_id())
    memory = region.mmap_obj
    assert memory is not None
    assert len(memory) == memory.size() == region.total_size_bytes
    memory[10:13] = b"abc"
    memory[13] = 100
    assert memory[9:15] == b"\0abcd\0"
    assert memory[-1] == 0
    assert memory[10] == 97
    with pytest.raises(IndexError):
        memory[len(memory)]
    with memoryview(memory) as whole:
        assert (whole.nbytes, whole.readonly) == (len(memory), False)
    assert not memory.closed
    kept = np.frombuffer(memory, np.uint8), torch.frombuffer(memory, dtype=torch.uint8)
    region.cleanup()
    assert memory.closed
    assert kept[0][11] == kept[1][11] == 98
    with refuses(ValueError):
        memory[0]
    with pytest.raises(ValueError, match="cleaned up"):
        memoryview(memory)


def test_the_attributes_of_vllms_class_are_there() -> None:
    """The attributes that callers of vLLM's class use."""
    with region_of(new_id(), 1, extra=9) as region:
        assert (region.num_blocks, region.rank, region.page_size) == (4, 1, PAGE)
        assert region.total_size_bytes == 8 * PAGE + 9
        assert region._row_stride == 2 * PAGE
        assert (region._creator, region.is_pinned) == (True, False)
        assert str(region.mmap_path) in repr(region)
