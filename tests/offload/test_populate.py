"""Start-up: which pages are populated, how, and what the caller is told."""

import threading
from pathlib import Path

import pytest

from tests.support import PATIENCE, Aside, until
from tests.support.regions import (
    PAGE,
    new_id,
    path_of,
    populated_pages,
    region_of,
)

pytestmark = pytest.mark.unit

MIB = 1 << 20


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("threads", [1, 3])
def test_each_rank_its_own_cells(workers: int, threads: int) -> None:
    """Even the creator leaves the others' cells to them; all the space is reserved."""
    instance = new_id()
    shape = {"blocks": 5, "workers": workers, "cell": 2 * PAGE, "threads": threads}
    regions = []
    for rank in range(workers):
        regions.append(region_of(instance, rank, **shape))  # type: ignore[arg-type]
        pages = populated_pages(path_of(instance))
        for number, is_populated in enumerate(pages):
            assert is_populated == (number // 2 % workers <= rank), number
        assert path_of(instance).stat().st_blocks * 512 == regions[0].total_size_bytes
    for region in regions:
        region.cleanup()


def test_the_whole_is_populated_without_a_rank() -> None:
    """Without a rank everything, up to the last byte."""
    instance = new_id()
    with region_of(instance, None, extra=PAGE + 1):
        assert all(populated_pages(path_of(instance)))


@pytest.mark.parametrize("rank", [None, 1])
def test_progress_is_reported_up_to_the_end(rank: int | None) -> None:
    """(bytes populated, bytes to populate): growing, in this thread, and complete at the end."""
    heard: list[tuple[int, int, threading.Thread]] = []

    def progress(done: int, total: int) -> None:
        heard.append((done, total, threading.current_thread()))

    blocks, cell = 24, 2 * MIB
    with region_of(new_id(), rank, blocks=blocks, cell=cell, progress=progress):
        pass
    total = blocks * cell * (2 if rank is None else 1)
    assert {one[1] for one in heard} == {total}
    assert {one[2] for one in heard} == {threading.current_thread()}
    amounts = [one[0] for one in heard]
    assert amounts == sorted(set(amounts))
    assert amounts[-1] == total


def test_progress_that_raises() -> None:
    """R8: the start fails with that error, and leaves nothing; the next one works."""
    instance = new_id()

    def progress(_done: int, _total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as kept:
        region_of(instance, progress=progress)
    assert not path_of(instance).exists()
    assert instance not in Path("/proc/self/maps").read_text(), kept.traceback
    region_of(instance).cleanup()


def test_others_are_let_in_before_the_creator_has_populated() -> None:
    """They need the space, not the creator's own pages."""
    instance = new_id()
    is_in = threading.Event()

    def progress(done: int, total: int) -> None:
        if done == total:
            assert is_in.wait(PATIENCE)

    creator = Aside(region_of, instance, 0, progress=progress)
    until(path_of(instance).exists)
    other = region_of(instance, 1)
    is_in.set()
    creator.result().cleanup()
    other.cleanup()
