"""Replays what eviction policies hit over the capacity, on published traces, beside the optimum.

`MEMLANE_TRACES` names the folder of the two traces of Mooncake (docs/howto/size-a-cache.md).
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import say
from memlane.errors import InvalidArgument
from memlane.tiers.replay import POLICIES, Trace, read, replay

TRACES = {"conversation": "conversation_trace.jsonl", "synthetic": "synthetic_trace.jsonl"}
CAPACITIES = (1000, 2000, 3000, 5000, 10_000, 20_000, 30_000, 50_000)
NEVER = 1 << 62


def optimum(trace: Trace, blocks: int) -> int:
    """Hits of Belady's algorithm, which knows the future, and stores only what will be hit."""
    accesses = [key for ids in trace for key in reversed(ids)]
    later: dict[int, int] = {}
    following = [NEVER] * len(accesses)
    for at in range(len(accesses) - 1, -1, -1):
        following[at] = later.get(accesses[at], NEVER)
        later[accesses[at]] = at
    hits = 0
    held: dict[int, int] = {}  # when each is needed next
    farthest: list[tuple[int, int]] = []  # (-when, key), also entries that are not true any more
    for key, when in zip(accesses, following, strict=True):
        hits += key in held
        held.pop(key, None)
        if when == NEVER:
            continue
        if len(held) == blocks:
            while held.get(farthest[0][1]) != -farthest[0][0]:
                heapq.heappop(farthest)
            if -farthest[0][0] <= when:
                continue  # all that is held is needed sooner
            del held[heapq.heappop(farthest)[1]]
        held[key] = when
        heapq.heappush(farthest, (-when, key))
    return hits


def measure() -> dict[str, Any]:
    """Percent of the accesses: prefix hits of each policy, and the optimum's hits."""
    folder = os.environ.get("MEMLANE_TRACES")
    if folder is None:
        raise InvalidArgument("MEMLANE_TRACES names no folder of published traces")
    return {
        "capacities": CAPACITIES,
        "percent": {name: _on(Path(folder) / file, name) for name, file in TRACES.items()},
    }


def _on(path: Path, name: str) -> dict[str, Sequence[float]]:
    trace = read(path)
    accesses = sum(map(len, trace))
    say(f"  {name}: the optimum")
    found: dict[str, Sequence[float]] = {
        "optimum": [100 * optimum(trace, blocks) / accesses for blocks in CAPACITIES]
    }
    for policy in POLICIES:
        say(f"  {name}: {policy}")
        hits = [replay(trace, policy, blocks)["prefix_hits"] for blocks in CAPACITIES]
        found[policy] = [round(100 * each / accesses, 3) for each in hits]
    return found
