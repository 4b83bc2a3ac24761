"""A promise, checked against figures of the same run."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.results import RATES, best, ratio
from memlane.cli.bench.measure import CellResult


@dataclass(frozen=True)
class Bar:
    """`met` is None if the run did not measure it."""

    promise: str
    figures: str
    met: bool | None


def missing(promise: str) -> Bar:
    return Bar(promise, "not measured", None)


def against(
    promise: str, cell: CellResult | None, measure: str, mine: str, others: list[str], factor: float
) -> Bar:
    """Compares `mine` with the best of `others`: at most `factor` for times, at least for rates."""
    other = best(cell, measure, others) if cell else None
    found = ratio(cell, measure, mine, other) if cell and other else None
    if cell is None or other is None or found is None:
        return missing(promise)
    met = found >= factor if measure in RATES else found <= factor
    values = (cell.peers[name].median(measure) or 0.0 for name in (mine, other))
    shown = " against ".join(f"{value:.4g}" for value in values)
    return Bar(promise, f"{found:.2f} x {other} ({shown})", met)
