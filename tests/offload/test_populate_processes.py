"""Start-up of a region in a process of its own: which pages are populated, and how."""

import struct
from typing import Any

import pytest

from memlane import Unsupported
from memlane._native import Population
from tests.support import Link, start
from tests.support.queues import refuses
from tests.support.regions import (
    PAGE,
    file_of,
    mapped,
    new_id,
    path_of,
    populated_pages,
    region_of,
    without_huge_pages,
    without_populate,
)

MIB = 1 << 20


def test_a_joiner_maps_what_is_there() -> None:
    """It has no page faults left, for reading or writing."""
    instance = new_id()
    with region_of(instance, None, blocks=64, cell=16 * PAGE):

        def role(_link: Link) -> tuple[int, int]:
            with region_of(instance, None, blocks=64, cell=16 * PAGE) as region:
                address = region._file.address
                flags = []
                with open("/proc/self/pagemap", "rb") as pagemap:
                    pagemap.seek(address // PAGE * 8)
                    for _ in range(region.total_size_bytes // PAGE):
                        flags.append(struct.unpack("Q", pagemap.read(8))[0] >> 63)
                return sum(flags), len(flags)

        there, all_of_them = start(role).result()
        assert there == all_of_them == 64 * 2 * 16


@pytest.mark.parametrize("rank", [None, 1])
def test_pages_are_populated_where_the_kernel_cannot(rank: int | None) -> None:
    """Every page is written to, and keeps its content."""
    instance = new_id()

    def role(_link: Link) -> list[bool]:
        without_populate()
        with region_of(instance, 0) as first:
            first.mmap_obj[:] = b"\7" * first.total_size_bytes
            file = file_of(instance)
            assert file.enter(1) == "joined"
            assert file.await_space(1) == "complete"
            file.map(False)
            part = (0, 8 * PAGE, 0, 1) if rank is None else (PAGE, PAGE, 2 * PAGE, 4)
            population = Population(file, *part, False, "4k", 2)
            while population.wait(1) != "done":
                pass
            assert population.was_touched
            population.stop()
            file.leave(1)
            with mapped(first.mmap_path) as memory:
                assert bytes(memory) == b"\7" * first.total_size_bytes
        with region_of(instance, rank):
            return populated_pages(path_of(instance))

    pages = start(role).result()
    assert pages == [rank is None or number % 2 == rank for number in range(8)]


def started_in(_link: Link, pages: str, rank: int | None) -> list[str]:
    """Returns what a creator, a joiner that populates the other cells, and the memory have."""
    instance = new_id()
    shape: dict[str, Any] = {"blocks": 40, "cell": MIB, "extra": 1, "pages": pages}
    with region_of(instance, rank, **shape) as region:
        assert path_of(instance).stat().st_blocks * 512 >= region.total_size_bytes
        with region_of(instance, 1, **shape) as other:
            region.create_kv_memoryview()[3][MIB] = 9
            assert other.create_next_array(1)[3, 0] == 9
            assert all(populated_pages(path_of(instance))[:-1])  # the last one is nobody's cell
            return [region.pages, other.pages]


@pytest.mark.parametrize("rank", [None, 0])
def test_huge_pages_are_made_and_mapped_by_all(rank: int | None) -> None:
    if start(started_in, "auto", rank).result() == ["4k", "4k"]:
        pytest.skip("this machine has no free huge pages now")
    assert set(start(started_in, "huge", rank).result()) <= {"huge", "mixed"}
    assert start(started_in, "4k", rank).result() == ["4k", "4k"]


def test_a_kernel_that_makes_no_huge_pages() -> None:
    """They are refused if asked for, with what to do, and nothing is left; else there are none."""

    def role(link: Link) -> None:
        without_huge_pages()
        assert started_in(link, "auto", None) == ["4k", "4k"]
        instance = new_id()
        with refuses(Unsupported, match="needs Linux 6.1"):
            region_of(instance, pages="huge")
        assert not path_of(instance).exists()

    start(role).result()
