"""`python -m benchmarks.store [--only PAYLOAD] [--readers N] [--rounds N] [--peers A,B]`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks import plot, report
from benchmarks.machine import describe
from benchmarks.results import Results
from benchmarks.session import Workspace
from benchmarks.store import bars
from benchmarks.store.measure import run_cell
from benchmarks.store.payloads import BY_NAME, PAYLOADS
from benchmarks.store.peers import PEERS
from benchmarks.store.shown import COLUMNS, PANELS

RESULTS = Path(__file__).parent.parent / "results"
READERS = (1, 4)
ROUNDS = 5


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.store",
        description="The object store by memlane and by what one would take instead, in one run.",
    )
    parser.add_argument("--only", action="append", choices=BY_NAME, default=[], help="a payload")
    parser.add_argument("--readers", action="append", type=int, default=[], help="a count")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="turns of every peer")
    parser.add_argument("--peers", help="names, separated by semicolons")
    parser.add_argument(
        "--output",
        type=Path,
        help=f"folder for store.json and .svg; a whole run writes to {RESULTS.name}/",
    )
    arguments = parser.parse_args()
    if any(count < 1 for count in (*arguments.readers, arguments.rounds)):
        parser.error("counts are positive")
    wanted = arguments.peers.split(";") if arguments.peers else []
    known = {peer.name for peer in PEERS}
    if unknown := [name for name in wanted if name not in known]:
        parser.error(f"no peer {unknown}; there are {sorted(known)}")
    arguments.chosen = [peer for peer in PEERS if not wanted or peer.name in wanted]
    return arguments


def _say(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of the cleaning up
    load = os.getloadavg()[0]
    results = Results(describe(), "default", arguments.rounds, load)
    _say(results.machine)
    if warning := report.load_warning(load):
        _say(warning)
    start = time.monotonic()
    with Workspace() as workspace:
        for payload in PAYLOADS:
            for readers in arguments.readers or READERS:
                if arguments.only and payload.name not in arguments.only:
                    continue
                cell = run_cell(
                    payload, readers, arguments.rounds, arguments.chosen, workspace, _say
                )
                results.cells.append(cell)
                for line in report.table(cell, COLUMNS):
                    _say(line)
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
    is_whole = not (arguments.only or arguments.readers or arguments.peers)
    folder = arguments.output or (RESULTS if is_whole else None)
    if folder is not None:
        command = " ".join(["python -m benchmarks.store", *sys.argv[1:]])
        report.write(folder / "store.json", report.to_json(results, checked, command))
        if picture := plot.svg(results, PANELS):
            report.write(folder / "store.svg", picture)
        _say(f"written to {folder}")


if __name__ == "__main__":
    main()
