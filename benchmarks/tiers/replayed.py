"""Measures what a policy hits through the calls of vLLM and of a chain, beside the replay of it
alone.

    python -m benchmarks.tiers.replayed TRACE... [--blocks 3000] [--front 0,1/3,1,3]
        [--through chain]

Through the plug-in: for each request of the trace vLLM's look-ups of the keys that a cache before
the tier does not have, up to the first that the tier does not have either, twice, as a request that
waits asks again; a load of what was found; and a store of what else is not in that cache, 16 blocks
a step. Through the chain: `fetch` and `reserve` of a pool. The cache before the tier is LRU, with
so many times the tier's blocks; 0: none.

The tier is a real one, on files in /dev/shm. vLLM's sources are those that `python -m
tests.engines.sources 0.33` fetches; its requirements are not needed.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.machine import describe
from memlane.tiers.pool import PolicyName
from memlane.tiers.replay import Trace, read, replay

ROW = 64  # bytes; a slot on the disk has 4096
STEP = 16  # blocks that vLLM computes in a step: 8,192 tokens of 512 a block
HEADERS, USES = 64, 8  # bytes of one of each block, in whole pages


class Counts(NamedTuple):
    """In percent of all accesses: blocks found with all before them, and what the tier wrote."""

    prefix: float
    stored: float


def capacity_of(blocks: int) -> int:
    """Bytes on disk for so many blocks."""
    headers, uses = -(-blocks * HEADERS // 4096), -(-blocks * USES // 4096)
    return 4096 * (2 + headers + uses + blocks)


class Front:
    """An LRU cache before the tier."""

    def __init__(self, blocks: int) -> None:
        self._blocks = blocks
        self._keys: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, number: int) -> bool:
        return number in self._keys

    def use(self, numbers: Sequence[int]) -> None:
        """A request for these, which are all there afterwards, or the first ones that fit."""
        for number in reversed(numbers):
            self._keys.pop(number, None)
            self._keys[number] = None
            if len(self._keys) > self._blocks:
                self._keys.popitem(last=False)


class Plugin:
    """The tier's class of `memlane.engines.vllm`, as vLLM calls it."""

    def __init__(self, folder: str, policy: PolicyName, blocks: int, front: int) -> None:
        if not import_module("tests.engines.stubs").is_installed():
            import_module("tests.engines.scenario").prepare("0.33")
        logging.getLogger("vllm").setLevel(logging.ERROR)
        self._own: Any = import_module("tests.engines.vllm_tier_scenarios")
        self._front = Front(front)
        rows: Any = np.zeros((1024, ROW), np.uint8)
        self._tier = self._own.made(
            memoryview(rows),
            type="DiskTier",
            path=folder,
            capacity=capacity_of(blocks),
            policy=policy,
            timeout=60,
            on_reset="keep",
        )
        self._jobs = itertools.count()

    def request(self, numbers: Sequence[int]) -> int:
        """Returns how many of the first ones are in the cache or the tier."""
        own, tier, front = self._own, self._tier, self._front
        context = own.ReqContext(req_id=str(next(own.names)))
        keys = [own.key(number) for number in numbers]
        run = 0
        for _ in range(2):
            run = next(
                (
                    at
                    for at, number in enumerate(numbers)
                    if number not in front and tier.lookup(keys[at], context) is not own.HIT
                ),
                len(numbers),
            )
        self._do([keys[at] for at in range(run) if numbers[at] not in front], context, True)
        tier.on_schedule_end(own.STEP)
        for at in range(run, len(keys), STEP):
            step = range(at, min(at + STEP, len(keys)))
            self._do([keys[each] for each in step if numbers[each] not in front], context, False)
        front.use(numbers)
        tier.on_request_finished(context)
        return run

    def _do(self, keys: list[bytes], context: Any, is_load: bool) -> None:
        if not keys:
            return
        job = self._own.TransferJob(
            next(self._jobs), keys, np.arange(len(keys), dtype=np.int32), is_load, context
        )
        (self._tier.submit_load if is_load else self._tier.submit_store)(job)
        self._tier.drain_jobs()
        (result,) = self._tier.get_finished_jobs()
        if not result.success:
            sys.exit("a job of the tier has failed")

    def stored(self) -> int:
        """Ends it, and returns how many blocks it has written."""
        stored: int = self._tier._tier.statistics().stored
        self._tier.shutdown()
        return stored


class Chain:
    """A chain of a pool, which is LRU, and a disk."""

    def __init__(self, folder: str, policy: PolicyName, blocks: int, front: int) -> None:
        from memlane.tiers import BlockPool, DiskTier, TierChain

        rows = np.zeros((max(front, 1024), ROW), np.uint8)
        self._disk = DiskTier(folder, rows, capacity_of(blocks), policy=policy, timeout=60)
        self._pool = BlockPool(max(front, 1024), "lru")
        self._chain = TierChain(self._pool, rows, [self._disk], timeout=60)

    def request(self, numbers: Sequence[int]) -> int:
        """Returns how many of the first ones are in the pool or the tier."""
        keys = [b"%d" % number for number in numbers]
        with self._chain.fetch(keys) as pin:
            for at in range(len(pin.ids), len(keys), STEP):
                with self._pool.reserve(keys[at : at + STEP]) as new:
                    new.commit()
                self._disk.drain()
                self._chain.poll()
            self._pool.touch(keys)
            return len(pin.ids)

    def stored(self) -> int:
        """Ends it, and returns how many blocks the disk has written."""
        stored = self._disk.statistics().stored
        self._chain.close(store=False)
        self._disk.close()
        return stored


WAYS: dict[str, type[Plugin | Chain]] = {"plug-in": Plugin, "chain": Chain}


def through(way: str, trace: Trace, policy: PolicyName, blocks: int, front: int) -> Counts:
    """Returns what a policy hits there."""
    accesses = sum(map(len, trace))
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="memlane-replayed-") as folder:
        tier = WAYS[way](folder, policy, blocks, front)
        found = sum(tier.request(list(dict.fromkeys(numbers))) for numbers in trace)
        return Counts(100 * found / accesses, 100 * tier.stored() / accesses)


def alone(trace: Trace, policy: PolicyName, blocks: int) -> Counts:
    """Returns what it hits in the replay."""
    made = replay(trace, policy, blocks)
    return Counts(*(100 * made[name] / made["accesses"] for name in ("prefix_hits", "stores")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("traces", type=Path, nargs="+", metavar="TRACE")
    parser.add_argument("--blocks", default="3000", help="of the tier: N[,N...]")
    parser.add_argument("--front", default="0", help="times the tier's blocks, before it")
    parser.add_argument("--policy", default="lru,arc,s3fifo,tuned")
    parser.add_argument("--through", choices=WAYS, default="plug-in")
    asked = parser.parse_args()
    logging.getLogger("memlane").setLevel(logging.ERROR)  # a tmpfs is what is wanted
    print(describe())
    print("prefix hits, and blocks written, in % of all accesses")
    policies: list[Any] = asked.policy.split(",")
    for path, size in itertools.product(asked.traces, asked.blocks.split(",")):
        trace, blocks = read(path), int(size)
        print(f"\n{path.stem}, {blocks} blocks")
        print(f"{'':24}" + "".join(f"{policy:>16}" for policy in policies))
        show("replay", (alone(trace, policy, blocks) for policy in policies))
        for part in asked.front.split(","):
            front = int(Fraction(part) * blocks)
            found = (through(asked.through, trace, each, blocks, front) for each in policies)
            show(f"{asked.through}, {part} x before", found)


def show(name: str, found: Iterable[Counts]) -> None:
    """Prints a row, as it is counted."""
    print(f"{name:24}", end="", flush=True)
    for counts in found:
        print(f"{counts.prefix:>9.2f} {counts.stored:>6.2f}", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
