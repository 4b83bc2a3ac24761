"""The measurements of `make gpu`: `python -m benchmarks.gpu [--dry] [--until TIME] ...`.

Every way to move blocks between the host and a GPU (`ways.py`), beside one copy of the same memory
in the same rounds; registration; and a matmul that runs beside each. Writes gpu.json and gpu.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from benchmarks import needs
from benchmarks.command import say
from benchmarks.machine import describe
from benchmarks.report import bar_lines, write

if TYPE_CHECKING:
    from benchmarks.gpu.device import Device

SECONDS = 240.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--dry", action="store_true", help="small sizes on a stand-in for a GPU")
    parser.add_argument(
        "--until",
        type=float,
        default=time.time() + SECONDS,
        help=f"seconds since the epoch; default: in {SECONDS:.0f} s",
    )
    parser.add_argument("--tests", type=Path, help="pytest's --junitxml, for the table")
    parser.add_argument(
        "--output", type=Path, default=Path("build/gpu"), help="default: %(default)s"
    )
    arguments = parser.parse_args()
    needs.package("torch", "python -m benchmarks.gpu")
    if arguments.dry:
        from tests.support.cuda import stand_in, with_runtime
        from tests.support.gpus import StandIn

        library = stand_in()
        with_runtime(library, lambda _: _measure(StandIn(library), arguments))
        return
    import torch

    if not torch.cuda.is_available():
        sys.exit("python -m benchmarks.gpu: torch finds no GPU here; --dry needs none")
    from benchmarks.gpu.device import Cuda

    _measure(Cuda(), arguments)


def _measure(device: Device, arguments: argparse.Namespace) -> None:
    from benchmarks.gpu import plan, shown
    from benchmarks.gpu.measure import measure
    from benchmarks.gpu.ways import ways

    scale = plan.DRY if arguments.dry else plan.FULL
    steps = plan.Plan(plan.steps(scale), arguments.until)
    command = " ".join(["python -m benchmarks.gpu", *sys.argv[1:]])
    date, tests = time.strftime("%Y-%m-%d"), _outcome(arguments.tests)
    run = shown.Run(describe(), device.name, date, command, scale, list(ways(device)), tests)
    begin = time.monotonic()
    for cell in measure(device, scale, steps):
        run.cells.append(cell)
        run.dropped, run.seconds = steps.dropped, time.monotonic() - begin
        say(cell.step.name)
        checked = list(shown.bars(run))  # written each time: a GPU may end the process
        write(arguments.output / "gpu.json", shown.to_json(run, checked))
        write(arguments.output / "gpu.md", shown.to_markdown(run, checked))
    say("\n" + shown.to_markdown(run, checked))
    for line in bar_lines(checked):
        say(line)
    say(f"written to {arguments.output}")
    if any(cell.failed for cell in run.cells):
        sys.exit(1)


def _outcome(report: Path | None) -> dict[str, int] | None:
    if report is None or not report.exists():
        return None
    suites = ElementTree.parse(report).getroot().iter("testsuite")
    names = ("tests", "failures", "errors", "skipped")
    totals = dict.fromkeys(names, 0)
    for suite in suites:
        for name in names:
            totals[name] += int(suite.get(name, "0"))
    return totals


if __name__ == "__main__":
    main()
