"""`memlane bench`: a queue beside pipes, ZeroMQ and what else is installed, measured in one run."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import memlane
from memlane.cli import writing
from memlane.cli.bench.channel import ARRAY, DICT
from memlane.cli.bench.measure import Cell, CellResult, run_cell
from memlane.cli.bench.peers import PEERS
from memlane.cli.bench.processes import Workspace
from memlane.errors import InvalidArgument

ROUNDS = 5
READERS = 4
_WIDTH = 80  # of the picture
CELLS = (
    Cell(DICT, READERS, paced=40, seconds=0.1, idle_seconds=0.3),
    Cell(ARRAY, READERS, paced=20, seconds=0.1),
)


@dataclass(frozen=True)
class Column:
    """`digits` after the point."""

    title: str
    payload: str
    measure: str
    digits: int


COLUMNS = (
    Column("dict\none way\nus", "dict", "p50_us", 0),
    Column("dict\nmessages/s", "dict", "messages_s", 0),
    Column("idle CPU of\n4 readers\n%", "dict", "idle_percent", 1),
    Column("1 MiB array\none way\nus", "array-1m", "p50_us", 0),
    Column("1 MiB array\nGB/s", "array-1m", "gb_s", 2),
)


def run(output: Path | None, prints_json: bool) -> None:
    """Measures for a quarter of a minute, and prints a table, or one JSON object.

    Raises:
        InvalidArgument: the picture cannot be written there; nothing is measured then.
    """
    if output is not None:
        _check(output)
    errors = Console(stderr=True, highlight=False)
    machine, left_out, results = _machine(), dict[str, str](), list[CellResult]()
    with errors.status("measuring: a quarter of a minute"), Workspace() as workspace:
        for cell in CELLS:
            result = run_cell(cell, ROUNDS, PEERS, workspace, lambda _: None)
            results.append(result)
            left_out |= {name: why for name, why in result.skipped.items() if name not in left_out}
    shown = {name for result in results for name in result.peers}
    left_out = {name: why for name, why in left_out.items() if name not in shown}
    if prints_json:
        writing.print_json(_json(machine, results, left_out))
    else:
        _print(writing.console(), machine, results, left_out)
    if output is not None:
        with open(os.devnull, "w") as nowhere:
            picture = Console(record=True, width=_WIDTH, file=nowhere, highlight=False)
            _print(picture, machine, results, left_out)
        with writing.replacing(output) as file:
            file.write(picture.export_svg(title="memlane bench"))


def _check(output: Path) -> None:
    place = output if output.exists() else output.parent
    if output.is_dir() or not os.access(place, os.W_OK):
        raise InvalidArgument(f"cannot write {output}: no file that can be written, or no folder")


def _print(
    console: Console, machine: str, results: list[CellResult], left_out: dict[str, str]
) -> None:
    """A row for each peer: medians of the rounds."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in COLUMNS:
        table.add_column(column.title, justify="right", vertical="bottom")
    for name in (peer.name for peer in PEERS):
        cells = [_figure(results, name, column) for column in COLUMNS]
        if any(cells):
            table.add_row(name, *(cell or "-" for cell in cells))
    console.print(f"one writer, {READERS} readers; medians of {ROUNDS} turns, taken in rotation")
    console.print(machine, markup=False)
    console.print()
    console.print(table)
    if left_out:
        console.print()
        for why in dict.fromkeys(left_out.values()):
            names = ", ".join(name for name, reason in left_out.items() if reason == why)
            console.print(f"without {names}: {why}", markup=False)


def _figure(results: list[CellResult], name: str, column: Column) -> str | None:
    (result,) = (result for result in results if result.payload == column.payload)
    figures = result.peers.get(name)
    median = None if figures is None else figures.median(column.measure)
    return None if median is None else f"{median:,.{column.digits}f}"


def _json(machine: str, results: list[CellResult], left_out: dict[str, str]) -> dict[str, Any]:
    """Medians and rounds, in the units that their names say."""
    return {
        "versions": {"memlane": memlane.__version__, "python": platform.python_version()},
        "machine": machine,
        "rounds": ROUNDS,
        "cells": [
            {
                "payload": result.title,
                "readers": result.readers,
                "peers": {name: figures.rounds for name, figures in result.peers.items()},
            }
            for result in results
        ],
        "left_out": left_out,
    }


def _machine() -> str:
    """With the load before anything is measured: other processes disturb."""
    cores = len(os.sched_getaffinity(0))
    return (
        f"memlane {memlane.__version__}, CPython {platform.python_version()}, "
        f"Linux {platform.release()}, {cores} cores, load {os.getloadavg()[0]:.1f}"
    )
