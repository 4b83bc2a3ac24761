"""Memlane's promises about GPUs, each as one scene on a `Device`.

`test_gpu.py` plays them on a GPU, `tests/offload/test_gpu_scenes.py` on its stand-in. A scene that
takes a size is played with gigabytes on a GPU, and with pages elsewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu.device import Device, error_left, fetched, pieces_of

from memlane import CopyFailed, InvalidArgument, PairRefused, Unsupported, copy_blocks
from tests.support import Link
from tests.support.gpus import start_with
from tests.support.queues import refuses
from tests.support.regions import PAGE, Region, new_id, region_of
from tests.support.stores import ArraySerde, is_evicted, store_of

GIB = 1 << 30
BLOCKS = 40
# Ids of blocks: a run, a regular step, single ones in no order, and all of these.
RUN = [(i, 5 + i) for i in range(20)]
STEP = [(2 * i, 39 - i) for i in range(15)]
SINGLE = [(39, 2), (7, 31), (20, 0)]
SHAPES = {"run": RUN, "step": STEP, "single": SINGLE, "all": [*RUN[:10], (30, 30), (33, 1)]}
# Blocks of these numbers of bytes, among them such as no aligned access can copy.
SIZES = (1, 100, 1024, PAGE, PAGE + 1, 32 << 10, 256 << 10, 4 << 20)


def random_bytes(*shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(sum(shape)).integers(-128, 128, shape, np.int8)


@contextmanager
def pinned_region(**shape: int) -> Iterator[Region]:
    with region_of(new_id(), **shape) as region:
        assert region.pin()
        yield region


def every_shape_arrives(gpu: Device, nbytes: int) -> None:
    """Blocks up to that size, byte by byte, both ways, from and to rows of one worker (no gap) and
    of two (a gap)."""
    for size in (size for size in SIZES if size <= nbytes):
        content, cell = random_bytes(BLOCKS, size), -(-size // PAGE) * PAGE
        for workers in (1, 2):
            with pinned_region(blocks=BLOCKS, workers=workers, cell=cell) as region:
                host = region.create_next_array(size)
                for pairs in SHAPES.values():
                    a, b = np.array(pairs).T
                    host[:] = content
                    there = gpu.zeros(BLOCKS, size)
                    assert copy_blocks(host, there, pairs) == len(pairs) * size
                    expected = np.zeros_like(content)
                    expected[b] = content[a]
                    assert np.array_equal(fetched(gpu, there), expected), (size, pairs)
                    host[:] = 0
                    copy_blocks(there, host, np.array([b, a]).T)
                    gpu.finish()
                    expected[:] = 0
                    expected[a] = content[a]
                    assert np.array_equal(host, expected), (size, pairs)
                del host


def pageable_memory(gpu: Device) -> None:
    """Arrays in pageable memory are moved in every shape: CUDA stages them, or makes the caller
    wait."""
    content = random_bytes(BLOCKS, PAGE)
    for host in (content.copy(), np.zeros((BLOCKS, 2 * PAGE), np.int8)[:, :PAGE]):
        for pairs in SHAPES.values():
            a, b = np.array(pairs).T
            host[:] = content
            there = gpu.zeros(BLOCKS, PAGE)
            copy_blocks(host, there, pairs, stream=gpu.stream()).wait()
            assert np.array_equal(fetched(gpu, there)[b], content[a])
            host[:] = 0
            copy_blocks(there, host, np.array([b, a]).T)
            assert np.array_equal(host[a], content[a])


def the_method_is_told(gpu: Device) -> None:
    """In the transfer, and in a DEBUG line of a call that waits."""
    logger, lines = logging.getLogger("memlane.offload"), list[str]()
    handler, level = logging.Handler(), logger.level
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        with pinned_region(blocks=BLOCKS) as region:
            host, there = region.create_next_array(PAGE), gpu.zeros(BLOCKS, PAGE)
            for name, ways in (("run", "2d"), ("single", "batch"), ("all", "2d+batch")):
                moved = copy_blocks(host, there, SHAPES[name], stream=gpu.stream())
                moved.wait()
                assert moved.method == ways
                copy_blocks(there, host, SHAPES[name])
                assert f"({ways})> from cuda" in lines.pop()
            del host
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def several_streams(gpu: Device) -> None:
    """Each copies a part; waited for in the reverse order."""
    content = random_bytes(BLOCKS, PAGE)
    with pinned_region(blocks=BLOCKS) as region:
        host, there = region.create_next_array(PAGE), gpu.zeros(BLOCKS, PAGE)
        host[:] = content
        parts = np.arange(BLOCKS).repeat(2).reshape(4, -1, 2)
        moved = [copy_blocks(host, there, part, stream=gpu.stream()) for part in parts]
        assert [one.wait() for one in reversed(moved)] == [BLOCKS // 4 * PAGE] * 4
        assert np.array_equal(fetched(gpu, there), content)
        del host


def several_regions(gpu: Device) -> None:
    """In one process; the end of one leaves the other pinned, and its copies under way."""
    first, second = region_of(new_id(), blocks=BLOCKS), region_of(new_id(), blocks=BLOCKS)
    assert first.pin()
    assert second.pin()
    content = random_bytes(2, BLOCKS, PAGE)
    there, stream = gpu.zeros(2, BLOCKS, PAGE), gpu.stream()
    gpu.delay(stream)
    for region, bytes_, target in zip((first, second), content, there, strict=True):
        host = region.create_next_array(PAGE)
        host[:] = bytes_
        copy_blocks(host, target, STEP, stream=stream)
        del host
    first.cleanup()
    assert second.is_pinned
    second.cleanup()
    a, b = np.array(STEP).T
    assert np.array_equal(fetched(gpu, there)[:, b], content[:, a])


def working(link: Link, gpu: Device, instance: str, rank: int) -> bool:
    """Role: a worker that fills its cells from its GPU."""
    with region_of(instance, rank, blocks=BLOCKS) as region:
        link.tell(region.pin())
        link.hear()
        host, there = region.create_next_array(PAGE), gpu.zeros(BLOCKS, PAGE)
        source = np.full((BLOCKS, PAGE), rank + 1, np.int8)
        whole = [(i, i) for i in range(BLOCKS)]
        copy_blocks(source, there, whole)
        copy_blocks(there, host, whole)
        link.tell()
        link.hear()
        left = bool((host == rank + 1).all())
        del host
    return left and error_left(gpu) == 0


def two_processes(gpu: Device) -> None:
    """Each pins the whole region and writes its own cells; both see all."""
    instance = new_id()
    workers = [start_with(gpu, working, instance, rank) for rank in range(2)]
    for worker in workers:
        assert worker.hear(60)  # pinned
    for worker in workers:
        worker.tell()
    for worker in workers:
        worker.hear(60)  # written
    for worker in workers:
        worker.tell()
    assert [worker.result(60) for worker in workers] == [True, True]


def unpinned_under_way(gpu: Device) -> None:
    """unpin() returns once the GPU no longer uses the memory."""
    _ended_under_way(gpu, Region.unpin)


def cleaned_up_under_way(gpu: Device) -> None:
    """So does the end of the region, with its arrays dropped before it."""
    _ended_under_way(gpu, Region.cleanup)


def _ended_under_way(gpu: Device, end: Any) -> None:
    content = random_bytes(BLOCKS, PAGE)
    with pinned_region(blocks=BLOCKS) as region:
        host, there, stream = region.create_next_array(PAGE), gpu.zeros(BLOCKS, PAGE), gpu.stream()
        host[:] = content
        gpu.delay(stream)
        moved = copy_blocks(host, there, STEP, stream=stream)
        del host
        assert not moved.done
        end(region)
        assert moved.done
    a, b = np.array(STEP).T
    assert np.array_equal(fetched(gpu, there)[b], content[a])


def refused_calls(gpu: Device) -> None:
    """Whatever is refused, by memlane or by CUDA, no later call reports an error of it."""
    with pinned_region(blocks=BLOCKS) as region:
        host, there, stream = region.create_next_array(PAGE), gpu.zeros(BLOCKS, PAGE), gpu.stream()
        for pairs in ([(0, 0), (1, 0)], [(0, BLOCKS)]):
            with refuses(PairRefused):
                copy_blocks(host, there, pairs, stream=stream)
            assert error_left(gpu) == 0
        for refusal, source, target in (
            (Unsupported, there, there),
            (InvalidArgument, host[:, 1:], there),
            (InvalidArgument, host, host),
        ):
            with refuses(refusal):
                copy_blocks(source, target, [(0, 1)], stream=stream)
            assert error_left(gpu) == 0
        del host
    with region_of(new_id()) as region:
        registering = registered_by_another(gpu, region, 0)
        assert region.pin() is False
        assert error_left(gpu) == 0
        registering()


def registered_in_part(gpu: Device) -> None:
    """A copy of memory of which another has registered a page: CUDA's manual says that it refuses
    that. If it does, no error is left; if it does not, the bytes arrive."""
    with region_of(new_id(), blocks=1, workers=1, cell=4 * PAGE) as region:
        registering = registered_by_another(gpu, region, PAGE)
        host, there = region.create_next_array(4 * PAGE), gpu.zeros(1, 4 * PAGE)
        host[:] = random_bytes(1, 4 * PAGE)
        try:
            copy_blocks(host, there, [(0, 0)], stream=gpu.stream()).wait()
        except CopyFailed:
            assert error_left(gpu) == 0
        else:
            assert np.array_equal(fetched(gpu, there), host)
        registering()
        del host


def registered_by_another(gpu: Device, region: Region, offset: int) -> Any:
    """Registers one page of the region behind memlane's back; returns what undoes that."""
    assert region._base is not None
    page = region._base.data_ptr() + offset
    assert gpu.runtime.cudaHostRegister(page, PAGE, 0) == 0

    def undo() -> None:
        assert gpu.runtime.cudaHostUnregister(page) == 0

    return undo


def registered_in_pieces(gpu: Device, nbytes: int) -> None:
    """Eight pieces; a copy crosses from each into the next, and arrives."""
    cell = nbytes // 16
    with pieces_of(nbytes // 8), pinned_region(blocks=16, workers=1, cell=cell) as region:
        assert len(region._locks.chunks()) == 8
        size = min(cell, 1 << 20)
        rows = np.asarray(region.create_kv_memoryview()).reshape(-1).view(np.int8)
        ends = np.arange(1, 8) * (nbytes // 8)
        for end in ends:
            rows[end - size // 2 : end + size // 2] = random_bytes(size)
        for end in ends:
            across = rows[None, end - size // 2 : end + size // 2]
            there = gpu.zeros(1, size)
            copy_blocks(across, there, [(0, 0)])
            assert np.array_equal(fetched(gpu, there), across)
        del rows, across
    assert error_left(gpu) == 0


def rolled_back(gpu: Device, nbytes: int) -> None:
    """The sixth of eight pieces fails: none stays registered, and pinning works afterwards."""
    with (
        pieces_of(nbytes // 8),
        region_of(new_id(), blocks=16, workers=1, cell=nbytes // 16) as region,
    ):
        registering = registered_by_another(gpu, region, 5 * (nbytes // 8) + PAGE)
        assert region.pin() is False
        assert not region.is_pinned
        assert error_left(gpu) == 0
        registering()
        for begin, _ in region._locks.chunks():  # each could be registered by anybody again
            assert gpu.runtime.cudaHostRegister(begin, PAGE, 0) == 0
            assert gpu.runtime.cudaHostUnregister(begin) == 0
        assert region.pin()


def released_after_its_event(gpu: Device) -> None:
    """The object stays stored until the GPU has read it, although the block ends before."""
    content = random_bytes(2000)
    with store_of(serde=ArraySerde) as (writer, (reader,)):
        there, stream = gpu.zeros(1, 2000), gpu.stream()
        block = reader.view(*writer.put("k", content))
        with block as view:
            copy_blocks(view[None], there, [(0, 0)], stream=stream)
            gpu.delay(stream)
            event = stream.record_event()
            block.release_after(event)
            block.release_after(stream)
            assert not event.query()
            assert writer.statistics().readers[0].outstanding == 1
            assert not is_evicted(writer)
            del view
        assert event.query()
        assert is_evicted(writer)
        assert np.array_equal(fetched(gpu, there)[0], content)


def an_image_goes_to_the_gpu_from_the_store(gpu: Device) -> None:
    """The GPU copies from the segment's own memory: no copy is made on the host."""
    image = random_bytes(64, 64, 3)
    with store_of(serde=ArraySerde) as (writer, (reader,)):
        there = gpu.zeros(64, 64, 3)
        with reader.view(*writer.put("k", image)) as view:
            assert "memlane-" in mapped_at(view.ctypes.data)
            copy_blocks(view, there, [(i, i) for i in range(64)])
            del view
        assert np.array_equal(fetched(gpu, there), image)


def mapped_at(address: int) -> str:
    """The line of this process's map with the address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(word, 16) for word in line.split()[0].split("-"))
        if begin <= address < end:
            return line
    return ""


def copying(link: Link, gpu: Device, instance: str) -> None:
    """Role: has copies both ways under way until it is killed."""
    region = region_of(instance, blocks=BLOCKS, workers=1)
    assert region.pin()
    host, there, stream = region.create_next_array(PAGE), gpu.zeros(BLOCKS, PAGE), gpu.stream()
    while True:
        gpu.delay(stream)
        copy_blocks(host, there, STEP, stream=stream)
        moved = copy_blocks(there, host, RUN, stream=stream)
        link.tell()
        link.hear()
        moved.wait()


def killed_under_way(gpu: Device) -> None:
    """kill -9 while copies are under way; the next start of the region works as the first."""
    instance = new_id()
    for _ in range(3):
        worker = start_with(gpu, copying, instance)
        worker.hear(60)
        worker.kill()
        with region_of(instance, blocks=BLOCKS, workers=1) as region:
            assert region.pin()
            host, there = region.create_next_array(PAGE), gpu.zeros(BLOCKS, PAGE)
            host[:] = random_bytes(BLOCKS, PAGE)
            whole = [(i, i) for i in range(BLOCKS)]
            copy_blocks(host, there, whole)
            assert np.array_equal(fetched(gpu, there), host)
            del host


SCENES = (
    pageable_memory,
    the_method_is_told,
    several_streams,
    several_regions,
    two_processes,
    unpinned_under_way,
    cleaned_up_under_way,
    refused_calls,
    registered_in_part,
    released_after_its_event,
    an_image_goes_to_the_gpu_from_the_store,
    killed_under_way,
)
# With the sizes on a GPU.
SIZED_SCENES = {
    every_shape_arrives: (SIZES[-1],),
    registered_in_pieces: (GIB, 8 * GIB, 32 * GIB),
    rolled_back: (8 * GIB,),
}
