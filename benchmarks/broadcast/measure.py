"""The cells of a plan, with the machine's own times once per round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.broadcast.floor import Floor, pickle_us, rested_pickle_us
from benchmarks.broadcast.plan import Plan
from memlane.cli.bench.channel import MIB, Peer
from memlane.cli.bench.measure import Cell, CellResult, Figures, Say, run_cell
from memlane.cli.bench.processes import Workspace

FLOOR_MESSAGES = 60


def measure_floor(cell: Cell, floor: Floor, figures: Figures) -> None:
    """The machine's own times, once per round."""
    if cell.payload.name == "dict":
        encode, decode = pickle_us(cell.payload.make())
        figures.add("encode_us", encode)
        figures.add("decode_us", decode)
        encode, decode = rested_pickle_us(cell.payload.make())
        figures.add("rested_encode_us", encode)
        figures.add("rested_decode_us", decode)
        figures.add("futex_us", floor.futex_us(cell.readers, FLOOR_MESSAGES))
    if cell.payload.is_array and cell.payload.bytes >= MIB:
        figures.add("memcpy_gb_s", floor.copy_gb_s(cell.payload.bytes))


def run(plan: Plan, peers: Sequence[Peer], workspace: Workspace, say: Say) -> Iterator[CellResult]:
    """Measures cell after cell."""
    floor = Floor(workspace.folder)
    for cell in plan.cells:
        yield run_cell(
            cell, plan.rounds, peers, workspace, say, partial(measure_floor, cell, floor)
        )
