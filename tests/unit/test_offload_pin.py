"""Page-locking, against a stand-in for CUDA's runtime that keeps its rules (`tests/cudart.cpp`)."""

import ctypes
import logging
import mmap
import os
from pathlib import Path
from typing import Any

import pytest

from memlane.offload import _page_locks
from tests.cuda import build_runtime, with_runtime
from tests.harness import Aside
from tests.queues import refuses
from tests.regions import PAGE, new_id, region_of


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_runtime(tmp_path_factory.mktemp("cuda"))


def test_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """False, one WARNING, and the region goes on as it is."""
    with region_of(new_id()) as region:
        assert region.pin() is False
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "pageable" in caplog.text
        assert not region.is_pinned
        region.unpin()
        region.create_next_array(1)[:] = 1


def test_cells_that_are_not_whole_pages() -> None:
    """Asked before anything else, with and without a GPU."""
    with region_of(new_id(), cell=PAGE + 1) as region, refuses(ValueError, match="whole pages"):
        region.pin()


def test_pin_and_unpin(library: Path) -> None:
    """The whole mapping, once; unlocked before it is unmapped."""

    def scene(fake: Any) -> None:
        region = region_of(new_id())
        assert region.pin() is True
        assert region.is_pinned
        assert fake.bytes_registered() == region.total_size_bytes
        assert region.pin() is True
        assert fake.ranges_registered() == 1
        region.unpin()
        region.unpin()
        assert fake.ranges_registered() == 0
        assert not region.is_pinned
        assert region.pin()
        region.cleanup()
        assert fake.ranges_registered() == 0
        assert not region.is_pinned

    with_runtime(library, scene)


def test_pin_in_threads(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One locks, the others find it locked; nobody undoes what another has done."""

    def scene(fake: Any) -> None:
        monkeypatch.setattr(_page_locks, "MOST_AT_ONCE", 2 * PAGE)
        with region_of(new_id(), blocks=500) as region:
            calls = [Aside(region.pin) for _ in range(4)]
            assert all(call.result() for call in calls)
            assert fake.ranges_registered() == 500

    with_runtime(library, scene)


def test_dropping_the_region_unpins(library: Path) -> None:
    def scene(_fake: Any) -> None:
        region = region_of(new_id())
        region.pin()
        del region

    with_runtime(library, scene)


@pytest.mark.parametrize("most", [1, 2 * PAGE, 3 * PAGE, 5 * PAGE, 100 * PAGE])
def test_chunks(library: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """As many whole rows as fit, all bytes, none twice."""

    def scene(fake: Any) -> None:
        monkeypatch.setattr(_page_locks, "MOST_AT_ONCE", max(most, 2 * PAGE))
        with region_of(new_id(), blocks=7, extra=PAGE) as region:
            assert region.pin()
            assert fake.bytes_registered() == region.total_size_bytes
            chunks = region._locks.chunks()
            assert len(chunks) == fake.ranges_registered()
            base = chunks[0][0]
            assert all((at - base) % (2 * PAGE) == 0 for at, _ in chunks)
            assert all(size <= max(most, 2 * PAGE) for _, size in chunks)

    with_runtime(library, scene)


def test_chunks_of_a_large_region() -> None:
    """64 GiB at most, on row boundaries."""
    gib = 1 << 30
    row = 3 * gib
    locks = _page_locks.PageLocks(0, 50 * row, row, "")
    assert [size for _, size in locks.chunks()] == [63 * gib, 63 * gib, 24 * gib]
    assert [at for at, _ in locks.chunks()] == [0, 63 * gib, 126 * gib]


def test_all_or_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third chunk fails: the first two are unlocked again, and no error sticks."""

    def scene(fake: Any) -> None:
        monkeypatch.setattr(_page_locks, "MOST_AT_ONCE", 2 * PAGE)
        caught: list[logging.LogRecord] = []
        handler = logging.Handler()
        handler.emit = caught.append  # type: ignore[method-assign]
        logging.getLogger("memlane").addHandler(handler)
        with region_of(new_id(), blocks=5) as region:
            fake.fail_at_call(3, 2)
            assert region.pin() is False
            assert fake.ranges_registered() == fake.sticky_error() == 0
            assert not region.is_pinned
            warnings = [one.getMessage() for one in caught if one.levelname == "WARNING"]
            assert len(warnings) == 1
            assert "out of memory" in warnings[0]
            fake.fail_at_call(0, 0)
            assert region.pin()
            assert fake.ranges_registered() == 5

    with_runtime(library, scene)


def test_pinned_by_the_caller(library: Path) -> None:
    """Who registers the base himself says so, and cleanup unregisters it."""
    pytest.importorskip("torch")

    def scene(fake: Any) -> None:
        region = region_of(new_id())
        assert region._base is not None
        address = ctypes.c_void_p(region._base.data_ptr())
        assert fake.cudaHostRegister(address, ctypes.c_size_t(region.total_size_bytes), 0) == 0
        region.is_pinned = True
        region.cleanup()
        assert fake.ranges_registered() == 0

    with_runtime(library, scene)


def test_pinned_in_parts_and_said_so_by_the_caller(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_pinned = True` on a region that is locked changes nothing: all parts are unlocked."""

    def scene(fake: Any) -> None:
        monkeypatch.setattr(_page_locks, "MOST_AT_ONCE", 2 * PAGE)
        region = region_of(new_id(), blocks=5)
        assert region.pin()
        assert fake.ranges_registered() == 5
        region.is_pinned = True
        region.cleanup()
        assert fake.ranges_registered() == 0

    with_runtime(library, scene)


def test_beside_a_mapped_file_whose_name_is_no_utf_8(library: Path, tmp_path: Path) -> None:
    """It is looked over on the way to the runtime, and nothing stays locked."""
    name = os.fsencode(tmp_path) + b"/\xff"

    def scene(fake: Any) -> None:
        with open(name, "w+b") as file:
            file.truncate(PAGE)
            with mmap.mmap(file.fileno(), PAGE):
                region = region_of(new_id())
                assert region.pin()
                region.unpin()
                assert fake.ranges_registered() == 0
                region.cleanup()

    with_runtime(library, scene)
