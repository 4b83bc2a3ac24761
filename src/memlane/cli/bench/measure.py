"""The peers of a cell take turns: each once per round, in an order that rotates by one."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from memlane.cli.bench.channel import MIB, Payload, Peer, Setting
from memlane.cli.bench.processes import Session, Workspace
from memlane.cli.bench.worker import Writer, writer_main

PAUSE = 0.001
# What a peer may have in flight to all readers; without a high-water mark it would take more.
_IN_FLIGHT_BYTES = 512 * MIB
_TENSORS = 24  # at most so many are sent back to back
Say = Callable[[str], None]


@dataclass
class Figures:
    """One peer in one cell. `rounds[measure]` has one value per round."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    ways_us: list[float] = field(default_factory=list)

    def add(self, measure: str, value: float) -> None:
        self.rounds.setdefault(measure, []).append(value)

    def median(self, measure: str) -> float | None:
        values = self.rounds.get(measure)
        return statistics.median(values) if values else None


@dataclass
class CellResult:
    """All peers with one payload and number of readers."""

    payload: str
    title: str
    readers: int
    peers: dict[str, Figures] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    floor: Figures = field(default_factory=Figures)


class Turn(Protocol):
    """One peer's open session; `take` measures and adds to its figures."""

    figures: Figures

    def take(self) -> None: ...


class Contender(NamedTuple):
    """A peer of a cell: its name, why it cannot run here, and how its session is opened."""

    name: str
    missing: str | None
    open: Callable[[ExitStack], Turn]


def take_turns(
    result: CellResult,
    contenders: Iterable[Contender],
    rounds: int,
    say: Say,
    before_round: Callable[[Figures], None] | None = None,
) -> CellResult:
    """All contenders side by side. Those that fail or hang are killed, reported and left out.

    `before_round` may add the machine's own times to the floor of the result.
    """
    turns: dict[str, Turn] = {}

    def leave_out(name: str, why: object) -> None:
        turns.pop(name, None)
        result.peers.pop(name, None)
        result.skipped[name] = str(why)
        say(f"  {name} is left out: {why}")

    with ExitStack() as stack:
        for name, missing, open_turn in contenders:
            if missing:
                leave_out(name, missing)
                continue
            try:
                turns[name] = open_turn(stack)
                result.peers[name] = turns[name].figures
            except Exception as error:
                leave_out(name, error)
        for number in range(rounds):
            if before_round is not None:
                before_round(result.floor)
            names = list(turns)
            start = number % max(len(names), 1)
            for name in names[start:] + names[:start]:
                try:
                    turns[name].take()
                except Exception as error:
                    leave_out(name, error)
    return result


@dataclass(frozen=True)
class Cell:
    """One payload and number of readers; messages and seconds are those of one peer's turn."""

    payload: Payload
    readers: int
    paced: int
    seconds: float
    idle_seconds: float = 0.0
    pause: float = PAUSE

    @property
    def most(self) -> int:
        """Messages that may be in flight. Peers that carry tensors limit themselves."""
        if self.payload.is_tensor:
            return _TENSORS
        return max(3, _IN_FLIGHT_BYTES // (self.payload.bytes * self.readers))

    def burst(self, messages_per_second: float) -> int:
        """Returns how many messages back to back fill the turn, within what may be in flight."""
        return max(3, min(int(self.seconds * messages_per_second), self.most))


class _Turn:
    """One peer's open session, and the figures that it has collected."""

    def __init__(self, session: Session, cell: Cell) -> None:
        self._ask, self._cell, self.figures = session.ask, cell, Figures()
        self._ask("warm_up")
        self._burst, known = 3, 0
        while self._burst > 2 * known and known < cell.most:  # each rate sizes the next burst
            known = self._burst
            self._burst = min(cell.burst(self._ask("back_to_back", known)), 30 * known)

    def take(self) -> None:
        cell, ask, add = self._cell, self._ask, self.figures.add
        ways = ask("paced", cell.paced, cell.pause) / 1e3
        add("p50_us", float(np.median(ways)))
        add("slowest_us", float(np.median(ways.max(axis=0))))
        self.figures.ways_us.extend(ways.ravel().tolist())
        rate = ask("back_to_back", self._burst)
        add("messages_s", rate)
        add("gb_s", rate * cell.payload.bytes / 1e9)
        if cell.idle_seconds:
            add("idle_percent", ask("idle", cell.idle_seconds))


def run_cell(
    cell: Cell,
    rounds: int,
    peers: Sequence[Peer],
    workspace: Workspace,
    say: Say,
    before_round: Callable[[Figures], None] | None = None,
) -> CellResult:
    """All peers with one payload, in turns."""

    def contender(peer: Peer) -> Contender:
        def open_turn(stack: ExitStack) -> Turn:
            places = workspace.folder, workspace.prefix, workspace.new_name()
            setting = Setting(cell.payload, cell.readers, *places)
            session = stack.enter_context(Session(writer_main, Writer, peer, setting))
            return _Turn(session, cell)

        return Contender(peer.name, peer.missing(cell.payload), open_turn)

    result = CellResult(cell.payload.name, cell.payload.title, cell.readers)
    return take_turns(result, map(contender, peers), rounds, say, before_round)
