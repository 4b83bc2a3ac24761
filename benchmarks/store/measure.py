"""A peer's turn: some slices of puts, gets and views, and some objects handed over."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.store.channel import Peer, Setting
from benchmarks.store.payloads import Payload
from benchmarks.store.worker import writer_main
from memlane.cli.bench.measure import CellResult, Contender, Figures, Say, Turn, take_turns
from memlane.cli.bench.processes import Session, Workspace

TIMEOUT = 60.0
SLICES = 5  # in a peer's turn
HAND_OVERS = 9  # in a peer's turn


def _us(times: list[int]) -> float:
    return statistics.median(times) / 1e3


class _Turn:
    """One peer's open session, and the figures that it has collected."""

    def __init__(self, session: Session) -> None:
        self._ask = session.ask
        self.figures = Figures()
        self.figures.add("put_cold_us", _us(self._ask("first_lap", timeout=TIMEOUT)))
        self._ask("slice", timeout=TIMEOUT)

    def take(self) -> None:
        times: dict[str, list[int]] = {}
        for _ in range(SLICES):
            for what, found in self._ask("slice", timeout=TIMEOUT).items():
                times.setdefault(what, []).extend(found)
        for what, found in times.items():
            self.figures.add(f"{what}_us", _us(found))
        ways = [self._ask("hand_over", timeout=TIMEOUT) for _ in range(HAND_OVERS)]
        self.figures.add("way_us", _us(ways))


def run_cell(
    payload: Payload,
    readers: int,
    rounds: int,
    peers: Sequence[Peer],
    workspace: Workspace,
    say: Say,
) -> CellResult:
    """All peers with one payload, in turns."""

    def contender(peer: Peer) -> Contender:
        def open_turn(stack: ExitStack) -> Turn:
            places = workspace.folder, workspace.prefix, workspace.new_name()
            setting = Setting(payload, readers, *places)
            session = Session(writer_main, peer, setting, open_seconds=peer.open_seconds)
            return _Turn(stack.enter_context(session))

        return Contender(peer.name, peer.missing(), open_turn)

    result = CellResult(payload.name, payload.title, readers)
    return take_turns(result, map(contender, peers), rounds, say)
