"""A real vLLM on its own queues and on memlane's: steps a second, and CPU time at a trickle.

Needs what `make engines` sets up (860 MB to fetch, once), and a quarter of an hour.
"""

from __future__ import annotations

from typing import Any

from benchmarks.engines.__main__ import SIDES, client, facts, variables
from benchmarks.engines.environment import set_up

ROUNDS = 4
RELEASE = "0.32"


def measure() -> dict[str, Any]:
    variables.update(set_up(RELEASE))
    found: dict[str, dict[str, list[float]]] = {side: {} for side in SIDES}
    for _ in range(ROUNDS):
        for side in SIDES:
            run = facts(list(client(side, "speed"))[-1][1])
            for name, value in run.items():
                if name != "tokens":
                    found[side].setdefault(name, []).append(value)
    return {"release": RELEASE, "rounds": ROUNDS, "sides": found}
