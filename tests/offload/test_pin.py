"""Page-locking, against a stand-in for CUDA's runtime (`tests/support/cudart.cpp`)."""

import ctypes
import logging
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from memlane import Closed
from memlane.offload import _page_locks, _runtime
from tests.support import Alarm, Aside
from tests.support.cuda import stand_in, with_runtime
from tests.support.missing import package
from tests.support.queues import refuses
from tests.support.regions import PAGE, new_id, region_of


@pytest.fixture(scope="module")
def library() -> Path:
    return stand_in()


def test_a_region_works_without_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """False, one warning, and the region still works."""
    with region_of(new_id()) as region:
        assert region.pin() is False
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "pageable" in caplog.text
        assert not region.is_pinned
        region.unpin()
        region.create_next_array(1)[:] = 1


def test_cells_that_are_not_whole_pages() -> None:
    """Checked before anything else, with and without a GPU."""
    with region_of(new_id(), cell=PAGE + 1) as region, refuses(ValueError, match="whole pages"):
        region.pin()


def test_pin_locks_the_whole_mapping_once(library: Path) -> None:
    """The whole mapping, once; unregistered before it is unmapped."""

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


def test_threads_that_pin_undo_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread locks, the others find it locked; none undoes another's work."""

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
def test_chunks_are_whole_rows_and_cover_all(
    library: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
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


def test_a_large_region_is_pinned_in_chunks() -> None:
    """64 GiB at most, on row boundaries."""
    gib = 1 << 30
    row = 3 * gib
    locks = _page_locks.PageLocks(0, 50 * row, row, "")
    assert [size for _, size in locks.chunks()] == [63 * gib, 63 * gib, 24 * gib]
    assert [at for at, _ in locks.chunks()] == [0, 63 * gib, 126 * gib]


def test_a_pin_locks_all_or_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third chunk fails: the first two are unregistered, and the error is cleared."""

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


@pytest.mark.parametrize("call", ["register", "unregister"])
def test_an_interrupted_pin_leaves_nothing_locked(
    library: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """A signal handler that raises behind a call of CUDA leaves nothing locked that memlane does
    not know of."""

    def scene(fake: Any) -> None:
        monkeypatch.setattr(_page_locks, "MOST_AT_ONCE", 2 * PAGE)
        original, left = getattr(_runtime.Runtime, call), [3]

        def interrupted(runtime: _runtime.Runtime, *args: int) -> None:
            original(runtime, *args)
            left[0] -= 1
            if left[0] == 0:
                raise Alarm

        monkeypatch.setattr(_runtime.Runtime, call, interrupted)
        with region_of(new_id(), blocks=5) as region:
            with pytest.raises(Alarm):
                region.unpin() if call == "unregister" and region.pin() else region.pin()
            assert fake.ranges_registered() == {"register": 0, "unregister": 2}[call]
            region.unpin()
            assert fake.ranges_registered() == 0

    with_runtime(library, scene)


@pytest.mark.parametrize("act", ["unpin", "cleanup"])
def test_a_pin_that_a_handler_undoes_leaves_nothing_locked(
    library: Path, monkeypatch: pytest.MonkeyPatch, act: str
) -> None:
    """In the middle of it: nothing stays locked. Fails without the guard: unmapped memory did."""

    def scene(fake: Any) -> None:
        monkeypatch.setattr(_page_locks, "MOST_AT_ONCE", 2 * PAGE)
        register = _runtime.Runtime.register
        with region_of(new_id(), blocks=5) as region:

            def undone(runtime: _runtime.Runtime, *args: int) -> None:
                register(runtime, *args)
                monkeypatch.setattr(_runtime.Runtime, "register", register)
                getattr(region, act)()

            monkeypatch.setattr(_runtime.Runtime, "register", undone)
            assert region.pin() is False
            assert fake.ranges_registered() == 0

    with_runtime(library, scene)


def test_cleanup_that_was_interrupted(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be called again. Fails without the guard: the memory stayed locked and the file."""

    def scene(fake: Any) -> None:
        region = region_of(new_id())
        region.pin()
        unregister = _runtime.Runtime.unregister

        def interrupted(_runtime: object, _address: int) -> None:
            raise Alarm

        monkeypatch.setattr(_runtime.Runtime, "unregister", interrupted)
        with pytest.raises(Alarm):
            region.cleanup()
        monkeypatch.setattr(_runtime.Runtime, "unregister", unregister)
        with refuses(Closed):
            region.pin()
        region.cleanup()
        assert fake.ranges_registered() == 0
        assert not Path(region.mmap_path).exists()

    with_runtime(library, scene)


def test_what_the_caller_has_pinned_is_unpinned_by_cleanup(library: Path) -> None:
    """A caller who registers the base sets is_pinned, and cleanup unregisters it."""
    package("torch")

    def scene(fake: Any) -> None:
        region = region_of(new_id())
        assert region._base is not None
        address = ctypes.c_void_p(region._base.data_ptr())
        assert fake.cudaHostRegister(address, ctypes.c_size_t(region.total_size_bytes), 0) == 0
        region.is_pinned = True
        region.cleanup()
        assert fake.ranges_registered() == 0

    with_runtime(library, scene)


def test_all_pinned_parts_are_unregistered_whatever_the_caller_sets(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Setting is_pinned on a locked region changes nothing: all parts are unregistered."""

    def scene(fake: Any) -> None:
        monkeypatch.setattr(_page_locks, "MOST_AT_ONCE", 2 * PAGE)
        region = region_of(new_id(), blocks=5)
        assert region.pin()
        assert fake.ranges_registered() == 5
        region.is_pinned = True
        region.cleanup()
        assert fake.ranges_registered() == 0

    with_runtime(library, scene)


@pytest.mark.parametrize("last", [b"\xff", b"\xc2\x85b", b"\x1c"])
def test_a_mapped_file_of_a_strange_name_hides_no_runtime(
    library: Path, tmp_path: Path, last: bytes
) -> None:
    """Neither bytes that are no UTF-8 nor what Python takes for the end of a line stop the look
    for the runtime, and nothing stays locked."""
    folder = os.fsencode(tmp_path) + b"/" + last
    os.mkdir(folder)
    name = folder + b"/file"

    def scene(fake: Any) -> None:
        with open(name, "w+b") as file:
            file.truncate(1 << 30)  # too long for a gap above the runtime: it is found first
            with mmap.mmap(file.fileno(), 1 << 30):
                region = region_of(new_id())
                assert region.pin()
                region.unpin()
                assert fake.ranges_registered() == 0
                region.cleanup()

    with_runtime(library, scene)


def test_cleanup_needs_no_descriptor_to_unlock(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runtime that locked the memory unlocks it; it is not searched for again."""

    def refuse(_path: Path) -> bytes:
        raise OSError(24, "Too many open files")

    def scene(fake: Any) -> None:
        region = region_of(new_id())
        assert region.pin()
        monkeypatch.setattr(Path, "read_bytes", refuse)
        region.cleanup()
        assert fake.ranges_registered() == 0
        assert not Path(region.mmap_path).exists()

    with_runtime(library, scene)


@pytest.mark.parametrize("in_use", [{2}, {0, 2}, set()], ids=str)
def test_the_gpu_that_is_in_use(
    library: Path, monkeypatch: pytest.MonkeyPatch, in_use: set[int]
) -> None:
    """On a thread whose current GPU is 0 none gets a context that the process does not use."""
    torch = package("torch")
    current = [0]
    seen: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        current.append(index)
        yield
        current.pop()

    def scene(_fake: Any) -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "device", device)
        monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", in_use.__contains__, raising=False)
        for name in ("register", "unregister"):
            real = getattr(_runtime.Runtime, name)
            monkeypatch.setattr(
                _runtime.Runtime,
                name,
                lambda *call, real=real: (seen.append(current[-1]), real(*call)),
            )
        with region_of(new_id()) as region:
            assert region.pin()
        assert seen == ([2, 2] if in_use == {2} else [0, 0])

    with_runtime(library, scene)
