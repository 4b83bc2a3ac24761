"""A process that creates a region, joins it or leaves it last dies at every point."""

from collections.abc import Callable
from typing import Any

from tests.crash.survivors import leaving_nothing
from tests.support import Doomed, Hooks, Link, Passage, Remote, Spot
from tests.support.regions import PAGE, mapped, new_id, path_of, region_of, start_region

Begin = Callable[..., Any]


def holding(_link: Link, begin: Begin, instance: str, rank: int, participants: int | None) -> None:
    """Role: a holder from start to end."""
    begin("start")
    region = region_of(instance, rank, threads=1, participants=participants)
    region.create_next_array(PAGE)[:] = 5
    begin("cleanup", region._creator)
    region.cleanup()


def holder(instance: str, rank: int) -> Remote:
    return start_region(instance, rank)


def is_zero(instance: str) -> bool:
    with mapped(path_of(instance)) as memory:
        return bytes(memory) == bytes(len(memory))


def creator_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """No other process holds the region: the next start works at once, and sees no old bytes."""
    instance = new_id()
    with leaving_nothing():
        doomed = Doomed(hooks, spot, holding, instance, 0, None)
        for _ in doomed.stages():
            doomed.go()
        seen = "replaced by the next start" if path_of(instance).exists() else "nothing is left"
        with region_of(instance, 1) as region:
            assert region._creator
            assert is_zero(instance)
        assert not path_of(instance).exists()
    return doomed.passages, seen


def participant_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The only participant dies: once it has mapped the region, nothing can be left."""
    instance = new_id()
    with leaving_nothing():
        doomed = Doomed(hooks, spot, holding, instance, 0, 1)
        for stage, _ in doomed.stages():
            if stage == "cleanup":
                assert not path_of(instance).exists()
            doomed.go()
        is_left = path_of(instance).exists()
        assert not is_left or (spot is not None and spot.stage == "start")
        region_of(instance, 0, participants=1).cleanup()
        assert not path_of(instance).exists()
    return doomed.passages, "replaced by the next start" if is_left else "nothing is left"


def joiner_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """The holder continues, and the next process joins."""
    instance = new_id()
    with leaving_nothing():
        region = region_of(instance, 0)
        region.create_next_array(1)[:] = 7
        doomed = Doomed(hooks, spot, holding, instance, 1, None)
        for stage, is_creator in doomed.stages():
            assert stage == "start" or is_creator is False
            doomed.go()
        with region_of(instance, 1) as other:
            assert not other._creator
            assert other.mmap_obj[0] == 7
        region.cleanup()
        assert not path_of(instance).exists()
        del region
    return doomed.passages, "the others go on, and the next one joins"


def replacer_dies(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """It was about to replace what a dead run had left; another process does so."""
    instance = new_id()
    with leaving_nothing():
        path_of(instance).write_bytes(b"\xee" * 8 * PAGE)
        path_of(instance).chmod(0o600)
        doomed = Doomed(hooks, spot, holding, instance, 0, None)
        for _ in doomed.stages():
            doomed.go()
        with region_of(instance, 0) as region:
            assert region._creator
            assert is_zero(instance)
        assert not path_of(instance).exists()
        del region
    return doomed.passages, "the next start replaces it, and sees no old bytes"


def creator_dies_beside_another(hooks: Hooks, spot: Spot | None) -> tuple[list[Passage], str]:
    """Another process starts at the same time: as creator or joiner, it gets a whole region."""
    instance = new_id()
    with leaving_nothing():
        doomed = Doomed(hooks, spot, holding, instance, 0, None)
        waiter = None
        for stage, _ in doomed.stages():
            if stage == "cleanup":
                waiter = waiter or holder(instance, 1)
            doomed.go()
        waiter = waiter or holder(instance, 1)
        with region_of(instance, 0) as region:
            assert not region._creator
            values = set(bytes(region.mmap_obj[:]))
            assert values in ({0}, {0, 5}), values
        waiter.leave()
        assert not path_of(instance).exists()
        del region
    return doomed.passages, "the other has a whole region"
