"""Holders of a region in several processes: joining, leaving, generations."""

import pytest

from memlane import SharedOffloadRegion
from tests.support import Link, start
from tests.support.regions import PAGE, file_of, new_id, path_of, region_of, start_region

pytestmark = pytest.mark.wheel

Region = SharedOffloadRegion


def test_one_creates_the_others_join(method: str) -> None:
    """One of several processes is the creator, and all see the same bytes."""
    instance = new_id()
    others = [start_region(instance, rank, method, workers=3) for rank in (0, 1)]
    with region_of(instance, None, workers=3) as whole:
        assert [other.greeting for other in others] == [True, False]
        assert not whole._creator
        for rank, other in enumerate(others):
            other.call(mark, 40 + rank)
            assert whole.mmap_obj[rank * PAGE] == 40 + rank
        for other in others:
            other.leave()
        assert path_of(instance).exists()
    assert not path_of(instance).exists()


def mark(region: Region, value: int) -> None:
    region.create_next_array(1)[:] = value


def exits(_link: Link, instance: str) -> None:
    region = region_of(instance)
    array = region.create_next_array(1)
    globals()["kept"] = (region, array, array.__dlpack__(), region.create_kv_memoryview())


def test_the_end_of_the_interpreter_removes_the_file() -> None:
    """No cleanup, and views are left: the file is removed nevertheless."""
    instance = new_id()
    start(exits, instance, method="spawn").result()
    assert not path_of(instance).exists()


def test_the_leftover_of_a_kill_is_replaced(method: str) -> None:
    """The next start replaces it at once."""
    instance = new_id()
    dead = start_region(instance, 0, method)
    dead.call(mark, 9)
    dead.peer.kill()
    assert path_of(instance).exists()
    with region_of(instance) as region:
        assert region._creator
        assert region.mmap_obj[0] == 0


def test_the_creator_dies_and_another_holds_it() -> None:
    """The region is alive: later starts join, and see its bytes."""
    instance = new_id()
    creator = start_region(instance)
    with region_of(instance, 1) as region:
        creator.call(mark, 9)
        creator.peer.kill()
        file = file_of(instance)
        assert (file.enter(1), file.await_space(1)) == ("joined", "complete")
        assert file.builder == 0
        file.leave(1)
        with region_of(instance) as later:
            assert not later._creator
            assert later.mmap_obj[0] == 9
        assert path_of(instance).exists()
        assert region.mmap_obj[0] == 9
    assert not path_of(instance).exists()
