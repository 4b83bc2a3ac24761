"""Measures how long a sleeping reader takes to get a scheduler's step: all percentiles up to
99.99."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.figures.peers import by_peer
from memlane.cli.bench.processes import Session

SLICE = 1000
SLICES = 50
PAUSE = 0.0005
PERCENTILES = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)


def _ways(session: Session) -> list[float]:
    ways = [session.ask("paced", SLICE, PAUSE, timeout=60.0).ravel() for _ in range(SLICES)]
    return [round(float(way) / 1e3, 2) for way in np.percentile(np.concatenate(ways), PERCENTILES)]


def measure() -> dict[str, Any]:
    return {
        "messages": SLICE * SLICES,
        "percentiles": PERCENTILES,
        "peers": by_peer(1, _ways),
    }
