"""Measures what each policy hits where prompts are asked for again and again, more than fit.

    python -m benchmarks.tiers.loops [--blocks 1000] [--laps 30]

Epochs over one set of prompts of 20 blocks, in a fixed order, and shuffled in each epoch. Counted
are the last two thirds.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from typing import get_args

from memlane.tiers.pool import PolicyName
from memlane.tiers.replay import replay

TIMES = (1.02, 1.1, 1.25, 1.5, 1.9)
PROMPT = 20  # blocks


def epochs(prompts: int, laps: int, shuffled: bool) -> Iterator[list[int]]:
    draw, order = random.Random(1), list(range(prompts))
    for _ in range(laps):
        if shuffled:
            draw.shuffle(order)
        for each in order:
            yield list(range(PROMPT * each, PROMPT * (each + 1)))


def hits(policy: PolicyName, blocks: int, times: float, laps: int, shuffled: bool) -> float:
    """Percent of the accesses after the first third of the laps."""
    prompts = int(blocks * times / PROMPT)
    first = replay(epochs(prompts, laps // 3, shuffled), policy, blocks)
    whole = replay(epochs(prompts, laps, shuffled), policy, blocks)
    accesses = whole["accesses"] - first["accesses"]
    return 100 * (whole["hits"] - first["hits"]) / accesses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=1000, help="the capacity")
    parser.add_argument("--laps", type=int, default=30)
    asked = parser.parse_args()
    policies: tuple[PolicyName, ...] = get_args(PolicyName)
    print(f"{'':>16}" + "".join(f"{policy:>8}" for policy in (*policies, "best")))
    for shuffled in (False, True):
        for times in TIMES:
            found = [hits(each, asked.blocks, times, asked.laps, shuffled) for each in policies]
            found.append(100 * asked.blocks / (PROMPT * int(asked.blocks * times / PROMPT)))
            order = "shuffled" if shuffled else "in order"
            print(f"{order:>8} x{times:<6.2f}" + "".join(f"{each:>8.1f}" for each in found))


if __name__ == "__main__":
    main()
