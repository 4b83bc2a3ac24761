"""A run's cells, and how its peers are compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from memlane.cli.bench.measure import CellResult

RATES = ("messages_s", "gb_s")  # measures where more is better


def best(cell: CellResult, measure: str, among: Iterable[str]) -> str | None:
    """The peer with the best median."""
    medians = {
        name: value
        for name in among
        if name in cell.peers and (value := cell.peers[name].median(measure)) is not None
    }
    choose = max if measure in RATES else min
    return choose(medians, key=lambda name: medians[name]) if medians else None


def ratio(cell: CellResult, measure: str, name: str, other: str) -> float | None:
    """Median over the rounds of the ratio of `name` to `other` in the same round."""
    both = [cell.peers[each] for each in (name, other) if each in cell.peers]
    pairs = zip(*(peer.rounds.get(measure, []) for peer in both), strict=False)
    ratios = [mine / theirs for mine, theirs in pairs] if len(both) == 2 else []
    return statistics.median(ratios) if ratios else None


@dataclass
class Results:
    machine: str
    mode: str
    rounds: int
    load_before: float
    load_after: float = 0.0
    seconds: float = 0.0
    cells: list[CellResult] = field(default_factory=list)

    def cell(self, payload: str, readers: int) -> CellResult | None:
        for cell in self.cells:
            if cell.payload == payload and cell.readers == readers:
                return cell
        return None
