"""`python -m benchmarks.offload.moving [--quick] [--shared]`.

Moves scattered blocks from one array to another with `copy_blocks`, numpy, torch, and a loop over
memoryviews, in one process, in turns, in an order that rotates by one each round. For comparison:
memcpy of blocks of the same size, and of one long array. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import needs
from benchmarks.bars import Bar
from benchmarks.machine import describe
from benchmarks.report import bar_lines, load_warning
from memlane import copy_blocks

SOURCE = Path(__file__).with_name("floor.cpp")
KIB, MIB = 1 << 10, 1 << 20
HALF = 512 * MIB  # size of each of the two arrays: ten times a large cache
ALIGNMENT = 4096
FLOOR_SECONDS = 0.3
MOST_PAIRS = 1_000_000
SIZES = {64: "64 B", 4 * KIB: "4 KiB", 64 * KIB: "64 KiB", 256 * KIB: "256 KiB", MIB: "1 MiB"}
ONE, TWO = "memlane, 1 thread", "memlane, 2 threads"
NUMPY, LOOP = "numpy dst[b] = src[a]", "memoryview loop"
TORCH_1, TORCH_2 = "torch index_copy_, 1 thread", "torch index_copy_, 2 threads"
PEERS = (NUMPY, TORCH_1, TORCH_2, LOOP)
SCATTERED_1, SCATTERED_2 = "memcpy, 1 thread", "memcpy, 2 threads"
LONG_1, LONG_2 = "memcpy of one array, 1 thread", "memcpy of one array, 2 threads"
FLOORS = {SCATTERED_1: (1, 1), SCATTERED_2: (1, 2), LONG_1: (0, 1), LONG_2: (0, 2)}

Array = np.ndarray[Any, np.dtype[np.int8]]


@dataclass
class Size:
    """One block size, with the GB/s of every round."""

    block_bytes: int
    pairs: int
    rates: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def ratio(self, mine: str, other: str) -> float:
        """The median of the ratios of the same rounds."""
        pairs = zip(self.rates[mine], self.rates[other], strict=True)
        return statistics.median(a / b for a, b in pairs)

    def nanoseconds(self, name: str) -> float:
        """Per pair, checks included."""
        return self.block_bytes / self.median(name)


def _array(shared: bool) -> Array:
    """A populated, page-aligned array: private (on huge pages where numpy uses them) or shared."""
    if shared:
        array = np.frombuffer(mmap.mmap(-1, HALF), np.int8)
    else:
        whole = np.empty(HALF + ALIGNMENT, np.int8)
        start = -whole.ctypes.data % ALIGNMENT
        array = whole[start : start + HALF]
    array[:] = 1
    return array


def _movers(src: Array, dst: Array, size: int, pairs: Any) -> dict[str, Callable[[], object]]:
    import torch  # here, because --help must work without it

    from_blocks, to_blocks = src.reshape(-1, size), dst.reshape(-1, size)
    a, b = pairs[:, 0].copy(), pairs[:, 1].copy()

    def numpy() -> None:
        to_blocks[b] = from_blocks[a]

    source, target = torch.from_numpy(from_blocks), torch.from_numpy(to_blocks)
    index_a, index_b = torch.from_numpy(a), torch.from_numpy(b)
    views, slots, plain = src.data, dst.data, pairs.tolist()

    def torch_on(threads: int) -> None:
        torch.set_num_threads(threads)
        target.index_copy_(0, index_b, source.index_select(0, index_a))

    def loop() -> None:
        for x, y in plain:
            slots[y * size : y * size + size] = views[x * size : x * size + size]

    return {
        ONE: lambda: copy_blocks(from_blocks, to_blocks, pairs, threads=1),
        TWO: lambda: copy_blocks(from_blocks, to_blocks, pairs, threads=2),
        NUMPY: numpy,
        TORCH_1: lambda: torch_on(1),
        TORCH_2: lambda: torch_on(2),
        LOOP: loop,
    }


def _floor(program: Path, block: int, threads: int) -> float:
    command = [str(program), str(HALF), str(block), str(threads), str(FLOOR_SECONDS)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _measure(sizes: list[int], rounds: int, shared: bool) -> Iterator[Size]:
    rng = np.random.default_rng(1)
    src, dst = _array(shared), _array(shared)
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "floor"
        build = [needs.compiler(), "-std=c++20", "-O2", "-pthread", "-o", str(program), str(SOURCE)]
        subprocess.run(build, check=True)
        for size in sizes:
            blocks = HALF // size
            count = min(blocks // 2, MOST_PAIRS)
            ids = [rng.permutation(blocks)[:count] for _ in range(2)]
            pairs = np.stack(ids, 1)
            movers = _movers(src, dst, size, pairs)
            result = Size(size, count)
            for number in range(rounds):
                names = list(movers)
                for name in names[number % len(names) :] + names[: number % len(names)]:
                    start = time.perf_counter()
                    movers[name]()
                    rate = count * size / (time.perf_counter() - start) / 1e9
                    result.rates.setdefault(name, []).append(rate)
                for name, (scattered, threads) in FLOORS.items():
                    rate = _floor(program, size * scattered, threads)
                    result.rates.setdefault(name, []).append(rate)
            yield result


def _table(size: Size) -> Iterator[str]:
    yield f"\n{size.pairs} pairs of {SIZES[size.block_bytes]}, scattered"
    for name in size.rates:
        yield f"{name:<32}{size.median(name):8.2f} GB/s {size.nanoseconds(name):12,.1f} ns a pair"


def bars(sizes: list[Size]) -> Iterator[Bar]:
    """The promises, checked against figures of the same rounds."""
    by_bytes = {size.block_bytes: size for size in sizes}
    if size := by_bytes.get(64 * KIB):
        best = max(PEERS, key=size.median)
        ratio = size.ratio(TWO, best)
        shown = f"{ratio:.2f} x {best} ({size.median(TWO):.2f} against {size.median(best):.2f})"
        yield Bar("64 KiB, 2 threads: >= 1.7 x the best peer", shown, ratio >= 1.7)
        for name in (SCATTERED_2, LONG_2):
            ratio = size.ratio(TWO, name)
            shown = f"{ratio:.2f} x ({size.median(TWO):.2f} against {size.median(name):.2f})"
            yield Bar(f"64 KiB, 2 threads: >= 0.9 x {name}", shown, ratio >= 0.9)
    if size := by_bytes.get(4 * KIB):
        ratio = size.ratio(TWO, NUMPY)
        shown = f"{ratio:.2f} x ({size.median(TWO):.2f} against {size.median(NUMPY):.2f} GB/s)"
        yield Bar("4 KiB, 2 threads: >= 3 x numpy", shown, ratio >= 3)
    if size := by_bytes.get(64):
        cost = size.nanoseconds(ONE)
        yield Bar("64 B, 1 thread: <= 60 ns a pair, checked", f"{cost:.1f} ns", cost <= 60)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload.moving")
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--shared", action="store_true", help="shared memory, on small pages")
    parser.add_argument("--only", action="append", type=int, choices=SIZES, default=[])
    arguments = parser.parse_args()
    needs.package("torch", "python -m benchmarks.offload.moving")
    needs.compiler()
    load = os.getloadavg()[0]
    print(describe(), flush=True)
    rounds = 3 if arguments.quick else 7
    sizes = []
    for size in _measure(arguments.only or list(SIZES), rounds, arguments.shared):
        print("\n".join(_table(size)), flush=True)
        sizes.append(size)
    print("\n".join(bar_lines(list(bars(sizes)))))
    print(f"\n{rounds} rounds; load {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    if warning := load_warning(load):
        print(warning)


if __name__ == "__main__":
    main()
