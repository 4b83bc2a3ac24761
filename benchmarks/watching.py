"""Measures what looking costs: `memlane ls`, `memlane top`, and a queue that is watched by it.

`python -m benchmarks.watching`: two minutes. Queues with their readers are in one process of this
run; the commands are processes of their own, `top` on a terminal.
"""

from __future__ import annotations

import argparse
import os
import pty
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

from benchmarks.machine import describe
from memlane.cli.bench.channel import DICT
from memlane.cli.bench.measure import Cell, run_cell
from memlane.cli.bench.peers import memlane_queue
from memlane.cli.bench.processes import Workspace
from memlane.testing import local_queue

MEMLANE = [sys.executable, "-m", "memlane"]
READERS = 8
LISTS = 9
TOP_SECONDS = 20.0
ROUNDS = 5


@contextmanager
def queues(count: int) -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(local_queue(READERS))
        yield


@contextmanager
def top() -> Iterator[int]:
    """Its pid, once it has started."""
    here, there = pty.openpty()
    process = subprocess.Popen([*MEMLANE, "top"], stdin=there, stdout=there, stderr=there)
    os.close(there)
    drain = threading.Thread(target=_drain, args=(here,))
    drain.start()
    try:
        time.sleep(2.0)
        yield process.pid
    finally:
        process.kill()
        process.wait()
        drain.join()
        os.close(here)


def _drain(terminal: int) -> None:
    """Reads what is drawn, as a terminal does, until it is hung up."""
    with suppress(OSError):
        while os.read(terminal, 65536):
            pass


def cpu_seconds(pid: int) -> float:
    """Returns the CPU time of a process, with that of its threads that have ended."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ls_seconds() -> list[float]:
    taken = []
    for _ in range(LISTS):
        start = time.monotonic()
        subprocess.run([*MEMLANE, "ls"], stdout=subprocess.DEVNULL, check=True)
        taken.append(time.monotonic() - start)
    return sorted(taken)


def top_percent() -> float:
    with top() as pid:
        before, start = cpu_seconds(pid), time.monotonic()
        time.sleep(TOP_SECONDS)
        return 100 * (cpu_seconds(pid) - before) / (time.monotonic() - start)


def beside(watching: AbstractContextManager[object]) -> dict[str, float]:
    """Medians of a queue with two readers, while it is watched in that way."""
    cell = Cell(DICT, 2, paced=200, seconds=1.0)
    peers = [peer for peer in memlane_queue.PEERS if peer.name == "memlane"]
    with watching, Workspace() as workspace:
        result = run_cell(cell, 3, peers, workspace, print)
    figures = result.peers["memlane"]
    return {name: figures.median(name) or 0.0 for name in ("p50_us", "messages_s")}


def show_ratios(watching: Callable[[], AbstractContextManager[object]], rounds: int) -> None:
    """Shows the ratio of a queue that is watched in that way to one that is not, taking turns."""
    ratios: dict[str, list[float]] = {}
    for number in range(rounds):
        order = (False, True) if number % 2 else (True, False)
        seen = {
            is_watched: beside(watching() if is_watched else nullcontext()) for is_watched in order
        }
        for name, value in seen[True].items():
            ratios.setdefault(name, []).append(value / seen[False][name])
    for name, values in ratios.items():
        shown = " ".join(f"{value:.2f}" for value in sorted(values))
        print(
            f"{name}, watched / not: median {statistics.median(values):.3f} of {shown}", flush=True
        )


def main() -> None:
    words = argparse.ArgumentParser(prog="python -m benchmarks.watching", description=__doc__)
    words.parse_args()
    print(describe())
    for count in (1, 20):
        with queues(count):
            taken = ls_seconds()
            print(
                f"{count} queues of {READERS} readers: memlane ls {statistics.median(taken):.2f} s "
                f"({taken[0]:.2f} to {taken[-1]:.2f}); memlane top {top_percent():.2f} % of a core",
                flush=True,
            )
    show_ratios(top, ROUNDS)


if __name__ == "__main__":
    main()
