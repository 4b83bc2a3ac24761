"""Formats a run for the terminal and as JSON."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.bars import Bar
from benchmarks.results import Results
from memlane.cli.bench.measure import CellResult, Figures

# Title, measure, unit.
Column = tuple[str, str, str]
NAME_WIDTH = 18
WIDTH = 13
# Above this number of runnable processes per core, other processes disturb the figures.
HIGH_LOAD = 0.5


def value(figures: Figures, measure: str) -> float | None:
    """The median of the rounds; of p99 over all messages of all rounds and readers."""
    if measure != "p99_us":
        return figures.median(measure)
    return statistics.quantiles(figures.ways_us, n=100)[98] if len(figures.ways_us) > 99 else None


def _text(number: float | None, measure: str, unit: str) -> str:
    if number is None:
        return "-"
    if measure == "messages_s":
        return f"{number:,.0f}"
    if measure in ("gb_s", "idle_percent"):
        return f"{number:.2f}" + (f" {unit}" if unit else "")
    return f"{number:,.{1 if number < 1e4 else 0}f} {unit}"


def table(cell: CellResult, columns: Sequence[Column]) -> Iterator[str]:
    """The lines of one cell: its peers, then the floor."""
    readers = "1 reader" if cell.readers == 1 else f"{cell.readers} readers"
    yield f"\n{cell.title}, {readers}"
    shown = [
        column
        for column in columns
        if any(value(figures, column[1]) is not None for figures in cell.peers.values())
    ]
    yield " " * NAME_WIDTH + "".join(f"{title:>{WIDTH}}" for title, _, _ in shown)
    for name, figures in cell.peers.items():
        cells = (_text(value(figures, measure), measure, unit) for _, measure, unit in shown)
        yield f"{name:<{NAME_WIDTH}}" + "".join(f"{text:>{WIDTH}}" for text in cells)
    if cell.floor.rounds:
        yield "floor: " + ", ".join(_floor(cell.floor))


def _floor(floor: Figures) -> Iterator[str]:
    for measure in floor.rounds:
        name, unit = measure.removesuffix("_us").removesuffix("_gb_s").replace("_", " "), "us"
        if measure.endswith("_gb_s"):
            unit = "GB/s"
        yield f"{name} {floor.median(measure):.1f} {unit}"


def load_warning(load: float) -> str | None:
    cores = len(os.sched_getaffinity(0))
    if load <= HIGH_LOAD * cores:
        return None
    return (
        f"WARNING: load {load:.1f} on {cores} cores: others use this machine; times are too long "
        "and ratios unsure"
    )


def bar_lines(bars: list[Bar]) -> Iterator[str]:
    yield "\nbars"
    marks = {True: "pass", False: "FAIL", None: "  - "}
    width = max(len(bar.promise) for bar in bars)
    for bar in bars:
        yield f"{marks[bar.met]}  {bar.promise:<{width}}  {bar.figures}"


def to_json(results: Results, bars: list[Bar], command: str) -> str:
    """Medians and the value of each round, without those of single messages."""
    cells = [
        {
            "payload": cell.payload,
            "readers": cell.readers,
            "floor": {name: cell.floor.median(name) for name in cell.floor.rounds},
            "peers": {name: _figures(figures) for name, figures in cell.peers.items()},
            "skipped": cell.skipped,
        }
        for cell in results.cells
    ]
    document = {
        "machine": results.machine,
        "command": command,
        "mode": results.mode,
        "rounds": results.rounds,
        "seconds": round(results.seconds, 1),
        "load_before": results.load_before,
        "load_after": results.load_after,
        "cells": cells,
        "bars": [asdict(bar) for bar in bars],
    }
    return json.dumps(document, indent=1) + "\n"


def _figures(figures: Figures) -> dict[str, Any]:
    names = (*figures.rounds, *(["p99_us"] if figures.ways_us else []))
    medians = {name: _short(value(figures, name)) for name in names}
    rounds = {name: list(map(_short, values)) for name, values in figures.rounds.items()}
    return {"median": medians, "rounds": rounds}


def _short(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.5g}")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
