"""`python -m benchmarks.offload.startup [--gib 1 2 8] [--rounds N] [--cell KIB]`.

How long it takes to create and populate a region (all of it, or the part of one rank of two), and
to join a populated one. Compared, in the same run and in turns, with Python without memlane: a
mapped file, populated by `mmap.madvise(MADV_POPULATE_WRITE)` block by block, or by a write to every
page. Neither reserves space: on a full /dev/shm the former fails with EFAULT, the latter by SIGBUS.

Each start runs in a fresh process. Figures are wall time, and processor time of all its threads.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from benchmarks.turns import aside, in_turns
from memlane import SharedOffloadRegion

GIB = 1 << 30
THREADS = 2
INSTANCE = f"benchmark-{os.getpid()}"
BARS = {"reserve and populate": 0.85, "join": 0.1}


@dataclass(frozen=True)
class Shape:
    """A region: `workers` cells of `cell` bytes in each of `blocks` rows."""

    gib: int
    cell: int
    workers: int

    @property
    def blocks(self) -> int:
        return self.gib * GIB // (self.cell * self.workers)

    def __str__(self) -> str:
        return f"{self.gib} GiB, {'whole' if self.workers == 1 else 'one rank of two'}"


Contender = Callable[[Shape], None]


def by_memlane(shape: Shape) -> None:
    region = SharedOffloadRegion(
        INSTANCE, shape.gib * GIB, shape.blocks, 0, shape.workers, shape.cell, threads=THREADS
    )
    _stop_the_clock()
    region.cleanup()


def _by_python(shape: Shape, populate: Callable[[mmap.mmap, int, int], None]) -> None:
    path = f"/dev/shm/{INSTANCE}.mmap"
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    os.unlink(path)
    os.ftruncate(descriptor, shape.gib * GIB)
    with mmap.mmap(descriptor, shape.gib * GIB) as memory:
        for block in range(shape.blocks):
            populate(memory, block * shape.cell * shape.workers, shape.cell)
        _stop_the_clock()
    os.close(descriptor)


def by_madvise(shape: Shape) -> None:
    def populate(memory: mmap.mmap, offset: int, size: int) -> None:
        memory.madvise(23, offset, size)  # MADV_POPULATE_WRITE

    _by_python(shape, populate)


def by_touch(shape: Shape) -> None:
    def populate(memory: mmap.mmap, offset: int, size: int) -> None:
        np.frombuffer(memory, np.uint8, size, offset)[:: mmap.PAGESIZE] = 0

    _by_python(shape, populate)


def join(shape: Shape) -> None:
    region = SharedOffloadRegion(
        INSTANCE, shape.gib * GIB, shape.blocks, None, shape.workers, shape.cell, threads=THREADS
    )
    _stop_the_clock()
    region.cleanup()


CONTENDERS: dict[str, Contender] = {
    "memlane": by_memlane,
    "madvise": by_madvise,
    "touch": by_touch,
}
_clock = [0.0, 0.0, 0.0]  # start; wall and processor seconds


def _stop_the_clock() -> None:
    _clock[1:] = [time.perf_counter() - _clock[0], time.process_time()]


def _timed(answer: Connection, contender: Contender, shape: Shape) -> None:
    used = time.process_time()
    _clock[0] = time.perf_counter()
    contender(shape)
    answer.send((_clock[1], _clock[2] - used))


def measure(contender: Contender, shape: Shape) -> tuple[float, float]:
    """Wall and processor seconds of one start in its own process."""
    with aside(_timed, contender, shape) as process:
        wall, used = process.hear()
    return float(wall), float(used)


def compare(shape: Shape, rounds: int) -> None:
    """Every contender in turn, so that other load on the machine affects all of them."""
    seen = in_turns(rounds, CONTENDERS, lambda name: measure(CONTENDERS[name], shape))
    base = statistics.median(wall for wall, _ in seen["madvise"])
    for name, times in seen.items():
        wall = statistics.median(one for one, _ in times)
        used = statistics.median(one for _, one in times)
        spread = f"{min(one for one, _ in times):.3f} to {max(one for one, _ in times):.3f}"
        print(
            f"  {name:10} {wall:7.3f} s ({spread}), processor {used:6.3f} s, "
            f"{wall / base:4.2f} x madvise"
        )
    if shape.workers == 1:
        ours = statistics.median(wall for wall, _ in seen["memlane"]) / base
        print(
            f"  reserve and populate: {ours:.2f} x madvise (at most {BARS['reserve and populate']})"
        )


def attach(shape: Shape, rounds: int) -> None:
    """Measures joining a region that another holder has populated."""
    with SharedOffloadRegion(INSTANCE, shape.gib * GIB, shape.blocks, 0, 1, shape.cell):
        times = [measure(join, shape) for _ in range(rounds)]
    wall = statistics.median(one for one, _ in times)
    used = statistics.median(one for _, one in times)
    print(f"  join       {wall:7.3f} s, processor {used:6.3f} s (2 GiB: at most {BARS['join']} s)")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload.startup")
    parser.add_argument("--gib", type=int, nargs="+", default=[1, 2, 8], help="sizes of the region")
    parser.add_argument("--rounds", type=int, default=5, help="turns of everybody")
    parser.add_argument("--cell", type=int, default=1024, help="KiB of one block of one worker")
    arguments = parser.parse_args()
    print(describe(), f"{THREADS} threads, cells of {arguments.cell} KiB", sep="; ")
    for gib in arguments.gib:
        facts = os.statvfs("/dev/shm")
        if facts.f_bavail * facts.f_frsize < (gib + 1) * GIB or _available() < (gib + 1) * GIB:
            print(f"{gib} GiB: left out, there is no room for it")
            continue
        for workers in (1, 2):
            shape = Shape(gib, arguments.cell << 10, workers)
            print(shape)
            compare(shape, arguments.rounds)
        attach(Shape(gib, arguments.cell << 10, 1), arguments.rounds)
    print(f"load {os.getloadavg()[0]:.1f} at the end")


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


if __name__ == "__main__":
    main()
