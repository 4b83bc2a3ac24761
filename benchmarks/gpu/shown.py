"""A run as JSON, as tables in Markdown, and against its bars. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field

from benchmarks.bars import Bar, missing
from benchmarks.gpu.device import TO_DEVICE
from benchmarks.gpu.measure import CEILING, Cell
from benchmarks.gpu.plan import DIRECTIONS, KIB, Scale, Step, shown
from benchmarks.gpu.ways import LIBRARY

AT_LEAST = "copy_blocks, {} blocks, {}: >= {:.0%} of the ceiling"
PIECES = "a region in 16 pieces: >= 90 % of the speed of one call"
NO_ERRORS = "tests: all pass, and none leaves a CUDA error"
Format = Callable[[Cell, str], str]


@dataclass
class Run:
    machine: str
    device: str
    date: str
    command: str
    scale: Scale
    peers: list[str]  # the names of all ways
    tests: dict[str, int] | None  # counts of pytest, if they have run
    cells: list[Cell] = field(default_factory=list)
    dropped: list[Step] = field(default_factory=list)
    seconds: float = 0.0

    def of(self, kind: str) -> list[Cell]:
        found = [cell for cell in self.cells if cell.step.kind == kind]
        return sorted(
            found, key=lambda cell: (cell.step.direction, cell.step.size, cell.step.count)
        )


# Bars -----------------------------------------------------------------------------------------


def bars(run: Run) -> Iterator[Bar]:
    for direction, name in DIRECTIONS.items():
        yield _share(run, direction, "32 KiB and larger", name, 0.95, lambda n: n >= 32 * KIB)
    name = DIRECTIONS[TO_DEVICE]
    yield _share(run, TO_DEVICE, "4 to 16 KiB", name, 0.8, lambda n: 4 * KIB <= n <= 16 * KIB)
    for cell in run.of("pieces"):
        figures = [cell.median(peer, "gb_s") or 0.0 for peer in ("16 pieces", "one call")]
        text = f"{figures[0]:.2f} against {figures[1]:.2f} GB/s"
        yield Bar(PIECES, text, figures[0] >= 0.9 * figures[1])
    if not run.of("pieces"):
        yield missing(PIECES)
    if run.tests is None:
        yield missing(NO_ERRORS)
    else:
        text = ", ".join(f"{count} {what}" for what, count in run.tests.items())
        ran = run.tests["tests"] - run.tests["skipped"]
        met = run.tests["failures"] + run.tests["errors"] == 0
        yield Bar(NO_ERRORS, text, met if ran else None)


def _share(
    run: Run, direction: int, sizes: str, name: str, least: float, counts: Callable[[int], bool]
) -> Bar:
    """The worst share of the ceiling among the sizes, each with the most blocks of it."""
    promise = AT_LEAST.format(sizes, name, least)
    most = {
        cell.step.size: cell
        for cell in run.of("move")
        if cell.step.direction == direction and counts(cell.step.size)
    }
    if most.keys() != {size for size in run.scale.sizes if counts(size)}:
        return missing(promise)
    worst = min(most.values(), key=lambda cell: share(cell, LIBRARY) or 0.0)
    best = max(worst.peers, key=lambda peer: (peer != CEILING and share(worst, peer)) or 0.0)
    reached = share(worst, LIBRARY) or 0.0
    text = (
        f"{reached:.0%} with {worst.step.count} of {shown(worst.step.size)} by {worst.method}; "
        f"best there: {best}, {share(worst, best):.0%}"
    )
    return Bar(promise, text, reached >= least)


def share(cell: Cell, peer: str) -> float | None:
    """Returns the share of the ceiling in the same rounds."""
    mine, most = cell.median(peer, "gb_s"), cell.median(CEILING, "gb_s")
    return mine / most if mine and most else None


# Text -----------------------------------------------------------------------------------------


def to_json(run: Run, checked: list[Bar]) -> str:
    document = {
        **{name: getattr(run, name) for name in ("machine", "device", "date", "command")},
        "seconds": round(run.seconds, 1),
        "scale": asdict(run.scale),
        "tests": run.tests,
        "ways": run.peers,
        "cells": [cell.document() for cell in run.cells],
        "dropped": [step.name for step in run.dropped],
        "bars": [asdict(bar) for bar in checked],
    }
    return json.dumps(document, indent=1) + "\n"


def to_markdown(run: Run, checked: list[Bar]) -> str:
    return "\n".join(_lines(run, checked)) + "\n"


def _lines(run: Run, checked: list[Bar]) -> Iterator[str]:
    yield f"{run.device}; {run.machine}. {run.date}, `{run.command}`, {run.seconds:.0f} s.\n"
    marks = {True: "met", False: "**not met**", None: "not measured"}
    yield from table(
        ["bar", "", "figures"], [[bar.promise, marks[bar.met], bar.figures] for bar in checked]
    )
    moves = run.of("move")
    peers = [name for name in run.peers if any(name in cell.peers for cell in moves)]
    yield f"\nGB/s, and percent of the ceiling: one copy of {shown(run.scale.ceiling)}.\n"
    yield from _cells(moves, [CEILING, *peers], _rate)
    yield "\nThe same of rows of the host, each with a gap as long as itself, in order.\n"
    yield from _cells(run.of("rows"), [CEILING, LIBRARY], _rate)
    yield "\nCPU time of the calling thread, ns a block.\n"
    yield from _cells(moves, peers, lambda cell, peer: _number(cell, peer, "cpu_ns", "{:.0f}"))
    yield "\nTime of a running bf16 matmul beside each way, 1 without; GB/s of the way meanwhile.\n"
    yield from _cells(run.of("beside a matmul"), peers, _slowdown)
    yield f"\nRegistration: {shown(run.scale.registered)} of private memory (huge pages if the"
    yield f"system has them), and a region of {shown(run.scale.pieces)}.\n"
    yield from table(
        ["memory", "GB/s"],
        [
            [peer, _number(cell, peer, "gb_s", "{:.2f}")]
            for cell in (*run.of("registration"), *run.of("pieces"))
            for peer in cell.peers
        ],
    )
    for peer, why in sorted({item for cell in run.cells for item in cell.skipped.items()}):
        yield f"\n{peer}: not here ({why})."
    for cell in run.cells:
        for what, why in cell.failed.items():
            yield f"\n**Failed**: {what} in {cell.step.name}: {why}."
    for step in run.dropped:
        yield f"\nNot measured, for lack of time: {step.name}."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"


def _cells(cells: list[Cell], peers: list[str], text: Format) -> Iterator[str]:
    rows = []
    for cell in cells:
        step = cell.step
        what = [DIRECTIONS[step.direction], shown(step.size), f"{step.count:,}"]
        rows.append([*what, *(text(cell, peer) for peer in peers)])
    return table(["direction", "block", "blocks", *peers], rows)


def _number(cell: Cell, peer: str, measure: str, form: str) -> str:
    value = cell.median(peer, measure)
    return "-" if value is None else form.format(value)


def _slowdown(cell: Cell, peer: str) -> str:
    slowdown = _number(cell, peer, "slowdown", "{:.2f}")
    return f"{slowdown} ({_number(cell, peer, 'gb_s', '{:.2f}')})"


def _rate(cell: Cell, peer: str) -> str:
    rate = _number(cell, peer, "gb_s", "{:.2f}")
    reached = share(cell, peer)
    if peer == CEILING or reached is None:
        return rate
    return f"{rate} ({reached:.0%}{', ' + cell.method if peer == LIBRARY else ''})"
