"""Start-up of a region in a process of its own: which pages are populated, and how."""

import struct

import pytest

from memlane._native import Population
from tests.support import Link, start, unshare_refusal
from tests.support.regions import (
    PAGE,
    file_of,
    mapped,
    new_id,
    path_of,
    populated_pages,
    region_of,
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
def test_kernel_without_populate(rank: int | None) -> None:
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
            population = Population(file, *part, False, False, 2)
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


def in_huge_pages(_link: Link, pages: str, rank: int | None) -> tuple[str, int, str]:
    import os
    import subprocess

    # Another one on top: a remount would repeat the owner of this one, which is nobody in here.
    options = "size=128m,mode=1777,huge=advise"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", "/dev/shm"], check=True)
    instance = new_id()
    with region_of(instance, rank, blocks=16, cell=MIB, extra=1, pages=pages) as region:
        os.fsync(region.fd or 0)
        file_bytes = path_of(instance).stat().st_blocks * 512
        with region_of(instance, 1, blocks=16, cell=MIB, extra=1, pages=pages) as other:
            region.create_kv_memoryview()[3][MIB] = 9
            assert other.create_next_array(1)[3, 0] == 9
            assert all(populated_pages(path_of(instance)))
            return region.pages, file_bytes, other.pages


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
@pytest.mark.parametrize(
    ("rank", "pages"),  # of rank 0 with small pages, nobody would populate the other cells
    [(None, "auto"), (None, "huge"), (None, "4k"), (0, "auto"), (0, "huge")],
)
def test_huge_pages(pages: str, rank: int | None) -> None:
    """They are used where the file system offers them, unless small ones are requested."""
    from tests.support import private_shm

    got, file_bytes, joined = start(
        in_huge_pages, pages, rank, method="spawn", command=private_shm("128m")
    ).result()
    assert file_bytes >= 32 * MIB + 1
    if pages == "4k":
        assert (got, joined) == ("4k", "4k")
    else:
        assert got == "huge"
        assert joined == "huge"
