"""A peer's turn: one slice of everything that the cell asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np

from benchmarks.broadcast.channel import Peer, Setting
from benchmarks.broadcast.floor import Floor, pickle_us, rested_pickle_us
from benchmarks.broadcast.payloads import MIB
from benchmarks.broadcast.plan import Cell, Plan
from benchmarks.broadcast.worker import writer_main
from benchmarks.results import CellResult, Figures
from benchmarks.session import Session, Workspace
from benchmarks.turns import Say, Turns

TIMEOUT = 30.0
FLOOR_MESSAGES = 60


class _Turn:
    """One peer's open session, and the figures that it has collected."""

    def __init__(self, session: Session, cell: Cell) -> None:
        self.session = session
        self._cell = cell
        self.figures = Figures()
        timeout = TIMEOUT
        session.ask("warm_up", timeout=timeout)
        self._burst, known = 3, 0
        while self._burst > 2 * known and known < cell.most:  # each rate sizes the next burst
            known = self._burst
            rate = session.ask("back_to_back", known, timeout=timeout)
            self._burst = min(cell.burst(rate), 30 * known)

    def take(self) -> None:
        cell, ask, add = self._cell, self.session.ask, self.figures.add
        ways = np.asarray(ask("paced", cell.paced, cell.pause, timeout=TIMEOUT)) / 1e3
        add("p50_us", float(np.median(ways)))
        add("slowest_us", float(np.median(ways.max(axis=0))))
        self.figures.ways_us.extend(ways.ravel().tolist())
        rate = ask("back_to_back", self._burst, timeout=TIMEOUT)
        add("messages_s", rate)
        add("gb_s", rate * cell.payload.bytes / 1e9)
        if cell.round_trips:
            add("round_trip_us", ask("round_trip", cell.round_trips, timeout=TIMEOUT) / 1e3)
        if cell.idle_seconds:
            add("idle_percent", ask("idle", cell.idle_seconds, timeout=TIMEOUT))


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
        if cell.readers == 1:
            figures.add("spin_us", floor.spin_us())
    if cell.payload.is_array and cell.payload.bytes >= MIB:
        figures.add("memcpy_gb_s", floor.copy_gb_s(cell.payload.bytes))


def run_cell(
    cell: Cell, rounds: int, peers: Sequence[Peer], floor: Floor, workspace: Workspace, say: Say
) -> CellResult:
    """All peers side by side. Those that fail or hang are killed, reported and left out."""
    result = CellResult(cell.payload.name, cell.payload.title, cell.readers)
    turns = Turns(result, say)
    with ExitStack() as stack:
        for peer in peers:
            if why := peer.missing(cell.payload):
                turns.leave_out(peer.name, why)
                continue
            setting = Setting(
                cell.payload,
                cell.readers,
                workspace.folder,
                workspace.prefix,
                workspace.new_name(),
            )
            with turns.or_left_out(peer.name):
                session = Session(writer_main, peer, setting, cell.round_trips > 0)
                turns.add(peer.name, _Turn(stack.enter_context(session), cell))
        for number in range(rounds):
            measure_floor(cell, floor, result.floor)
            turns.take(number)
    return result


def run(plan: Plan, peers: Sequence[Peer], workspace: Workspace, say: Say) -> Iterator[CellResult]:
    """Measures cell after cell."""
    floor = Floor(workspace.folder)
    for cell in plan.cells:
        yield run_cell(cell, plan.rounds, peers, floor, workspace, say)
