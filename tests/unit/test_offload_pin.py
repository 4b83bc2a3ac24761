"""Page-locking, against a small stand-in for the CUDA runtime: no GPU is here to run the real one.

The stand-in keeps the rules of cudaHostRegister that matter: overlapping ranges and ranges that are
not mapped are refused, and an error sticks until somebody asks for it.
"""

import ctypes
import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memlane.offload import _page_locks
from tests.harness import Link, start
from tests.queues import refuses
from tests.regions import PAGE, new_id, region_of

SOURCE = r"""
#include <sys/mman.h>
#include <cstdint>
#include <map>
static std::map<std::uintptr_t, std::uintptr_t> held;
static int sticky = 0, calls = 0, fail_at = -1, unmapped = 0;
static bool mapped(std::uintptr_t at) {
    unsigned char page;
    return mincore(reinterpret_cast<void*>(at / 4096 * 4096), 1, &page) == 0;
}
extern "C" {
int cudaHostRegister(void* p, std::size_t n, unsigned) {
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    if (++calls == fail_at) return sticky = 2;
    for (auto [begin, end] : held)
        if (at < end && begin < at + n) return sticky = 712;
    if (n == 0 || !mapped(at) || !mapped(at + n - 1)) return sticky = 1;
    held[at] = at + n;
    return 0;
}
int cudaHostUnregister(void* p) {
    const auto at = reinterpret_cast<std::uintptr_t>(p);
    if (held.erase(at) == 0) return sticky = 713;
    if (!mapped(at)) ++unmapped;
    return 0;
}
int cudaGetLastError() { const int last = sticky; sticky = 0; return last; }
const char* cudaGetErrorString(int code) { return code == 2 ? "out of memory" : "wrong"; }
int held_ranges() { return static_cast<int>(held.size()); }
unsigned long held_bytes() { unsigned long n = 0; for (auto [b, e] : held) n += e - b; return n; }
int sticky_error() { return sticky; }
int unregistered_after_unmapping() { return unmapped; }
void fail_at_call(int n) { calls = 0; fail_at = n; }
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "fake.cpp").write_text(SOURCE)
    path = folder / "libcudart.so.0"
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-o", path, folder / "fake.cpp"], check=True
    )
    return path


def with_runtime(library: Path, scene: Callable[[Any], None]) -> None:
    """Plays the scene in a process that has the stand-in loaded, as torch loads the real one."""

    def role(_link: Link) -> None:
        fake = ctypes.CDLL(str(library))
        fake.held_bytes.restype = ctypes.c_ulong
        scene(fake)
        assert fake.held_ranges() == fake.sticky_error() == fake.unregistered_after_unmapping() == 0

    start(role).result()


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
        assert fake.held_bytes() == region.total_size_bytes
        assert region.pin() is True
        assert fake.held_ranges() == 1
        region.unpin()
        region.unpin()
        assert fake.held_ranges() == 0
        assert not region.is_pinned
        assert region.pin()
        region.cleanup()
        assert fake.held_ranges() == 0
        assert not region.is_pinned

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
            assert fake.held_bytes() == region.total_size_bytes
            chunks = region._locks.chunks()
            assert len(chunks) == fake.held_ranges()
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
            fake.fail_at_call(3)
            assert region.pin() is False
            assert fake.held_ranges() == fake.sticky_error() == 0
            assert not region.is_pinned
            warnings = [one.getMessage() for one in caught if one.levelname == "WARNING"]
            assert len(warnings) == 1
            assert "out of memory" in warnings[0]
            fake.fail_at_call(-1)
            assert region.pin()
            assert fake.held_ranges() == 5

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
        assert fake.held_ranges() == 0

    with_runtime(library, scene)
