"""Figures by peer, one value per round, and how they are compared."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

# Measures where more is better.
RATES = ("messages_s", "gb_s")


@dataclass
class Figures:
    """One peer in one cell. `rounds[measure]` has one value per round."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    ways_us: list[float] = field(default_factory=list)

    def add(self, measure: str, value: float) -> None:
        self.rounds.setdefault(measure, []).append(value)

    def median(self, measure: str) -> float | None:
        values = self.rounds.get(measure)
        return statistics.median(values) if values else None

    def p99_us(self) -> float | None:
        """Over all messages of all rounds and readers."""
        return statistics.quantiles(self.ways_us, n=100)[98] if len(self.ways_us) > 99 else None


@dataclass
class CellResult:
    """All peers with one payload and number of readers."""

    payload: str
    title: str
    readers: int
    peers: dict[str, Figures] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    floor: Figures = field(default_factory=Figures)

    def best(self, measure: str, among: Iterable[str]) -> str | None:
        """The peer with the best median."""
        medians = {
            name: value
            for name in among
            if name in self.peers and (value := self.peers[name].median(measure)) is not None
        }
        if not medians:
            return None
        choose = max if measure in RATES else min
        return choose(medians, key=lambda name: medians[name])

    def ratio(self, measure: str, name: str, other: str) -> float | None:
        """Median over the rounds of the ratio of `name` to `other` in the same round."""
        if name not in self.peers or other not in self.peers:
            return None
        pairs = list(
            zip(
                self.peers[name].rounds.get(measure, ()),
                self.peers[other].rounds.get(measure, ()),
                strict=False,
            )
        )
        return statistics.median(mine / theirs for mine, theirs in pairs) if pairs else None


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
