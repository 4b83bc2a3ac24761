"""`python -m benchmarks.broadcast [--quick] [--only PAYLOAD] [--readers N] [--peers A,B]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks import plot, report
from benchmarks.broadcast import bars, measure, plan
from benchmarks.broadcast.payloads import BY_NAME
from benchmarks.broadcast.peers import PEERS
from benchmarks.broadcast.shown import COLUMNS, PANELS
from benchmarks.machine import describe
from benchmarks.results import CellResult, Results

RESULTS = Path(__file__).parent.parent / "results"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.broadcast",
        description="Broadcast by memlane and by what one would take instead, in one run.",
    )
    parser.add_argument("--quick", action="store_true", help="about a minute, fewer cells")
    parser.add_argument("--only", action="append", choices=BY_NAME, default=[], help="a payload")
    parser.add_argument("--readers", action="append", type=int, default=[], help="a count")
    parser.add_argument("--rounds", type=int, help="turns of every peer")
    parser.add_argument("--peers", help="names, separated by commas")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"folder for broadcast.json and .svg; a whole run writes to {RESULTS.name}/",
    )
    arguments = parser.parse_args()
    if any(count < 1 for count in arguments.readers) or (arguments.rounds or 1) < 1:
        parser.error("counts are positive")
    wanted = (arguments.peers or "").split(",") if arguments.peers else []
    known = {peer.name for peer in PEERS}
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no peer {unknown}; there are {sorted(known)}")
    arguments.chosen = [peer for peer in PEERS if not wanted or peer.name in wanted]
    return arguments


def _say(line: str) -> None:
    print(line, flush=True)


def _show(cell: CellResult) -> None:
    for line in report.table(cell, COLUMNS):
        _say(line)


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the cleaning up
    load = os.getloadavg()[0]
    mode = "quick" if arguments.quick else "default"
    chosen = plan.make(arguments.quick, arguments.only, arguments.readers, arguments.rounds)
    results = Results(describe(), mode, chosen.rounds, load)
    _say(results.machine)
    if warning := report.load_warning(load):
        _say(warning)
    start = time.monotonic()
    results.cells = measure.run(chosen, arguments.chosen, _show, _say)
    results.seconds = time.monotonic() - start
    results.load_after = os.getloadavg()[0]
    checked = list(bars.bars(results))
    for line in report.bar_lines(checked):
        _say(line)
    _say(
        f"\n{results.seconds:.0f} s, {results.rounds} rounds; load {load:.1f} before, "
        f"{results.load_after:.1f} after (this run's own processes included)"
    )
    if warning := report.load_warning(load):
        _say(warning)
    is_whole = not (arguments.quick or arguments.only or arguments.readers or arguments.peers)
    folder = arguments.output or (RESULTS if is_whole else None)
    if folder is not None:
        command = " ".join(["python -m benchmarks.broadcast", *sys.argv[1:]])
        report.write(folder / "broadcast.json", report.to_json(results, checked, command))
        if picture := plot.svg(results, PANELS):
            report.write(folder / "broadcast.svg", picture)
        _say(f"written to {folder}")


if __name__ == "__main__":
    main()
