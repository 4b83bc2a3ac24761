"""Shared by the command lines that measure peers in turns: options, tables, files."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import plot, report
from benchmarks.bars import Bar
from benchmarks.machine import describe
from benchmarks.results import Results
from memlane.cli.bench.measure import CellResult
from memlane.cli.bench.processes import Workspace

RESULTS = Path(__file__).parent / "results"


def say(line: str) -> None:
    print(line, flush=True)


def parser(
    name: str, what: str, payloads: Iterable[str], peers: Iterable[str]
) -> argparse.ArgumentParser:
    """The parser of `python -m benchmarks.NAME`. An option that is not given selects all."""
    words = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=what)
    words.add_argument("--only", action="append", choices=payloads, default=[], help="a payload")
    words.add_argument("--readers", action="append", type=_positive, default=[], help="a count")
    words.add_argument("--peer", action="append", choices=peers, default=[], help="a peer")
    words.add_argument("--rounds", type=_positive, help="turns of every peer")
    words.add_argument(
        "--output",
        type=Path,
        help=f"folder for {name}.json and .svg; a whole run writes to {RESULTS.name}/",
    )
    return words


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("counts are positive")
    return number


def run(
    name: str,
    results: Results,
    measure: Callable[[Workspace], Iterator[CellResult]],
    columns: Sequence[report.Column],
    bars: Callable[[Results], Iterator[Bar]],
    panels: Sequence[plot.Panel],
    folder: Path | None,
) -> None:
    """Prints each cell as soon as it is measured, and checks the promises at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises, for the clean-up
    say(results.machine)
    _warn_of(results.load_before)
    start = time.monotonic()
    with Workspace() as workspace:
        for cell in measure(workspace):
            results.cells.append(cell)
            for line in report.table(cell, columns):
                say(line)
    results.seconds = time.monotonic() - start
    results.load_after = os.getloadavg()[0]
    checked = list(bars(results))
    for line in report.bar_lines(checked):
        say(line)
    say(
        f"\n{results.seconds:.0f} s, {results.rounds} rounds; load {results.load_before:.1f} "
        f"before, {results.load_after:.1f} after (this run's own processes included)"
    )
    _warn_of(results.load_before)
    if folder is not None:
        words = " ".join([f"python -m benchmarks.{name}", *sys.argv[1:]])
        report.write(folder / f"{name}.json", report.to_json(results, checked, words))
        if picture := plot.svg(results, panels):
            report.write(folder / f"{name}.svg", picture)
        say(f"written to {folder}")


def results_of(mode: str, rounds: int) -> Results:
    """Empty results, with this machine and its load now."""
    return Results(describe(), mode, rounds, os.getloadavg()[0])


def _warn_of(load: float) -> None:
    if warning := report.load_warning(load):
        say(warning)
