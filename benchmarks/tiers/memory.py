"""Bytes of memory that a slot costs the process that has the index, by policy and size; with
`--packs` what a block of an object tier costs, by how many share an object.

    python -m benchmarks.tiers.memory [--blocks 10000,50000,1000000] [--policy lru,tuned]
    python -m benchmarks.tiers.memory --packs

Each in a process of its own: a pool is filled, and asked for ten times as many other keys, so that
lists of evicted keys are full.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from memlane.tiers import BlockPool
from memlane.tiers.remote.packs import Index, Pack, path_of

KEY_BYTES = 24  # a digest, as a disk tier has it
AT_A_TIME = 256
PACKED = 64_000  # blocks in an index of objects
ROUNDS = 12  # times the blocks, in keys that come once


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def fill(blocks: int, policy: str) -> BlockPool:
    """A pool whose index, lists and shadows are full."""
    draw = np.random.default_rng(1)
    pool = BlockPool(blocks, policy)  # type: ignore[arg-type]
    for _ in range(-(-ROUNDS * blocks // AT_A_TIME)):
        noise = draw.bytes(AT_A_TIME * KEY_BYTES)
        keys = [noise[at : at + KEY_BYTES] for at in range(0, len(noise), KEY_BYTES)]
        with pool.pin(keys), pool.reserve(keys) as new:
            new.commit()
    return pool


def grown(blocks: int, policy: str) -> int:
    """Bytes that a pool takes."""
    fill(64, "lru")  # what the calls themselves need
    before = resident()
    pool = fill(blocks, policy)
    taken = resident() - before
    pool.clear()
    return taken


def packs() -> None:
    """Prints what the index of an object tier takes for a block."""
    folder = "kv/" + 32 * "0"
    for blocks in (1, 4, 32):
        tracemalloc.start()
        index = Index()
        for _ in range(PACKED // blocks):
            path = path_of(folder, [os.urandom(12) for _ in range(blocks)])
            pack = Pack.named(folder, path, 1 << 20)
            assert pack is not None
            index.add([pack])
        taken, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        print(f"{blocks:>2} blocks an object: {taken / PACKED:4.0f} bytes a block")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", default="1000,10000,50000,200000,1000000")
    parser.add_argument("--policy", default="lru,arc,s3fifo,tuned")
    parser.add_argument("--packs", action="store_true", help="only the index of an object tier")
    parser.add_argument("--one", action="store_true", help="only this, in this process")
    asked = parser.parse_args()
    if asked.packs:
        packs()
        return
    sizes = [int(size) for size in asked.blocks.split(",")]
    policies = asked.policy.split(",")
    if asked.one:
        print(grown(sizes[0], policies[0]))
        return
    print(describe())
    print(f"{'blocks':>9}" + "".join(f"{policy:>18}" for policy in policies))
    for size in sizes:
        cells = []
        for policy in policies:
            command = [sys.executable, "-m", "benchmarks.tiers.memory", "--one"]
            command += ["--blocks", str(size), "--policy", policy]
            taken = int(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
            cells.append(f"{taken / size:>9.0f} {taken / 1e6:>5.1f} MB")
        print(f"{size:>9}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
