"""A peer's turn: one slice of everything that a cell asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from memlane.cli.bench.channel import Peer, Setting
from memlane.cli.bench.payloads import MIB, Payload
from memlane.cli.bench.results import CellResult, Figures
from memlane.cli.bench.session import Session, Workspace
from memlane.cli.bench.turns import Say, Turns
from memlane.cli.bench.worker import writer_main

TIMEOUT = 30.0
PAUSE = 0.001
# What a peer may have in flight to all readers; without a high-water mark it would take more.
IN_FLIGHT_BYTES = 512 * MIB
# At most this many tensors are sent back to back.
TENSORS = 24


@dataclass(frozen=True)
class Cell:
    """One payload and number of readers; messages and seconds are those of one peer's turn."""

    payload: Payload
    readers: int
    paced: int
    round_trips: int
    seconds: float
    idle_seconds: float
    pause: float

    @property
    def most(self) -> int:
        """Messages that may be in flight. Peers that carry tensors limit themselves."""
        if self.payload.is_tensor:
            return TENSORS
        return max(3, IN_FLIGHT_BYTES // (self.payload.bytes * self.readers))

    def burst(self, messages_per_second: float) -> int:
        """How many messages back to back fill the turn, within what may be in flight."""
        return max(3, min(int(self.seconds * messages_per_second), self.most))


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


def run_cell(
    cell: Cell,
    rounds: int,
    peers: Sequence[Peer],
    workspace: Workspace,
    say: Say,
    before_round: Callable[[Figures], None] | None = None,
) -> CellResult:
    """All peers side by side. Those that fail or hang are killed, reported and left out.

    `before_round` may add the machine's own times to the floor of the result.
    """
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
            if before_round is not None:
                before_round(result.floor)
            turns.take(number)
    return result
