"""R4: a region that does not fit is refused at start; one that has started never gets a SIGBUS."""

import os
from collections.abc import Callable

import pytest

from memlane import ShmExhausted
from memlane._native import Population, RegionFile
from tests.support import Link, holdings, private_shm, start, surplus, unshare_refusal
from tests.support.queues import refuses
from tests.support.regions import PAGE, file_of, new_id, path_of, region_of

pytestmark = pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
MIB = 1 << 20
Role = Callable[[Link], None]


def free() -> int:
    facts = os.statvfs("/dev/shm")
    return facts.f_bavail * facts.f_frsize


def does_not_fit(_link: Link) -> None:
    before, held = free(), holdings("vllm_offload_")
    instance = new_id()
    for rank in (0, None):
        with refuses(MemoryError, match="--shm-size") as caught:
            region_of(instance, rank, blocks=20, cell=MIB)
        error = caught.value
        assert isinstance(error, ShmExhausted)
        assert error.need == 40 * MIB
        assert error.free == before
        assert free() == before
    assert not surplus(held, holdings("vllm_offload_"))
    region_of(instance, blocks=2, cell=MIB).cleanup()
    assert free() == before


def fits_exactly_and_is_used(_link: Link) -> None:
    """Every byte can be used, even in cells not populated, while nothing else is free."""
    instance = new_id()
    with region_of(instance, 0, blocks=15, cell=MIB) as region:
        with open("/dev/shm/filler", "wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, free())
        with refuses(MemoryError):
            region_of(new_id())
        rows = region.create_kv_memoryview()
        for row in rows:
            row[:] = b"\1" * len(row)
        with region_of(instance, 1, blocks=15, cell=MIB) as other:
            assert other.create_next_array(MIB).all()
        os.unlink("/dev/shm/filler")


def created_and_then_full(instance: str) -> RegionFile:
    """A file for which there is no longer enough space."""
    file = file_of(instance, blocks=15, cell=MIB)
    assert file.enter(1) == "created"
    with open("/dev/shm/filler", "wb") as filler:
        os.posix_fallocate(filler.fileno(), 0, 20 * MIB)
    file.map(False)
    return file


def space_goes_while_it_is_reserved(_link: Link) -> None:
    """Space that was free at the check is taken: the same error, and all is given back."""
    instance = new_id()
    before = free()
    file = created_and_then_full(instance)
    for pages in ("4k", "huge"):
        population = Population(file, 0, 30 * MIB, 0, 1, True, pages, 2)
        with refuses(MemoryError) as caught:
            while population.wait(1) != "done":
                pass
        assert isinstance(caught.value, ShmExhausted)
        assert caught.value.need == 30 * MIB
        assert 0 <= caught.value.free < 30 * MIB
        population.stop()
    file.leave(1)
    os.unlink("/dev/shm/filler")
    assert (free(), path_of(instance).exists()) == (before, False)


def one_page_too_large(_link: Link) -> None:
    pages = free() // PAGE
    with refuses(MemoryError):
        region_of(new_id(), blocks=pages + 1, workers=1)
    region_of(new_id(), blocks=pages, workers=1).cleanup()


@pytest.mark.parametrize(
    "role",
    [
        does_not_fit,
        fits_exactly_and_is_used,
        space_goes_while_it_is_reserved,
        one_page_too_large,
    ],
)
def test_what_does_not_fit_is_refused(role: Role) -> None:
    start(role, method="spawn", command=private_shm("32m")).result()
