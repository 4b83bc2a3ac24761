"""Measures what a chain of pool, disk and Redis finds, and how fast, beside each alone,
alternating.

    python -m benchmarks.tiers.chain [--requests 600] [--rounds 3]

Requests are for prompts of 32 blocks of 64 KiB, of which some come often and most seldom (Zipf).
The pool has room for 16 prompts, the disk for 64 (page cache, threads), the server for all. What is
missing takes a while to be computed, 0.2 ms a block; meanwhile the tiers store what was evicted.
The time of a request is that of its `fetch`.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import needs
from benchmarks.machine import describe
from benchmarks.tiers.redis import server

ROW = 65536
BLOCKS = 32
PROMPTS = 256
POOL, DISK = 16, 64  # prompts
COMPUTED = 2e-4  # seconds a block
WAYS = {
    "pool alone": (),
    "pool, disk": ("disk",),
    "pool, Redis": ("redis",),
    "pool, disk, Redis": ("disk", "redis"),
}


class Seen(NamedTuple):
    """The results of one pass: parts of all blocks, ms of a request, MB/s of what was loaded."""

    found: float
    in_pool: float
    dropped: float
    p50: float
    p99: float
    loaded: float


def run(tiers: tuple[str, ...], url: str, requests: int) -> Seen:
    """One pass, from empty."""
    own = import_module("memlane.tiers")
    rows = np.zeros((POOL * BLOCKS, ROW), np.uint8)
    pool = own.BlockPool(POOL * BLOCKS, "lru")
    draw = np.random.default_rng(7)
    prompts = draw.zipf(1.2, requests) % PROMPTS
    spent, found = [], 0
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        opened: list[Any] = []
        if "disk" in tiers:
            disk = own.DiskTier(
                folder, rows, DISK * BLOCKS * (ROW + 4096), policy="lru", direct=False
            )
            opened.append(stack.enter_context(disk))
        if "redis" in tiers:
            space = f"{time.time_ns()}"
            opened.append(stack.enter_context(own.RedisTier(url, rows, namespace=space)))
        chain = stack.enter_context(own.TierChain(pool, rows, opened)) if opened else None
        for prompt in prompts.tolist():
            keys = [b"%d %d" % (prompt, block) for block in range(BLOCKS)]
            begun = time.perf_counter()
            with pool.pin(keys) if chain is None else chain.fetch(keys, 5.0) as pin:
                spent.append(1e3 * (time.perf_counter() - begun))
                found += len(pin.ids)
                with pool.reserve(pin.missing) as new:
                    time.sleep(COMPUTED * len(new))
                    rows[[row for _, row in new]] = prompt % 251
                    new.commit()
        asked = requests * BLOCKS
        if chain is None:
            hits = pool.statistics().prefix_hits
            return Seen(found / asked, hits / asked, 0.0, *quantiles(spent), 0.0)
        seen = chain.statistics()
        seconds = sum(each.loading_seconds for each in seen.tiers)
        loaded = sum(each.bytes_loaded for each in seen.tiers)
        return Seen(
            found / asked,
            seen.hits / asked,
            seen.dropped / asked,
            *quantiles(spent),
            loaded / max(seconds, 1e-9) / 1e6,
        )


def quantiles(values: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    p50, p99 = np.percentile(values, [50, 99])
    return float(p50), float(p99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    needs.package("redis", "the Redis tier")
    if shutil.which("redis-server") is None:
        sys.exit("this benchmark runs a server of its own: install redis-server")
    seen: dict[str, list[Seen]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as url:
        for _ in range(arguments.rounds):
            for name, tiers in WAYS.items():
                seen[name].append(run(tiers, url, arguments.requests))
    print(f"{arguments.requests} requests, medians of {arguments.rounds} passes; {describe()}")
    print(f"{'':18}  found  in the pool  dropped  ms a request p50    p99  loaded MB/s")
    for name, passes in seen.items():
        one = Seen(*map(statistics.median, zip(*passes, strict=True)))
        print(
            f"{name:18} {one.found:6.1%} {one.in_pool:12.1%} {one.dropped:8.1%}"
            f" {one.p50:17.2f} {one.p99:6.2f} {one.loaded:12.0f}"
        )


if __name__ == "__main__":
    main()
