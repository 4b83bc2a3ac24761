"""A peer's turn: some slices of puts, gets and views, and some objects handed over."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack

from benchmarks.store.channel import Peer, Setting
from benchmarks.store.payloads import Payload
from benchmarks.store.worker import writer_main
from memlane.cli.bench.results import CellResult, Figures
from memlane.cli.bench.session import Session, Workspace
from memlane.cli.bench.turns import Say, Turns

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
    """All peers side by side. Those that fail or hang are killed, reported and left out."""
    result = CellResult(payload.name, payload.title, readers)
    turns = Turns(result, say)
    with ExitStack() as stack:
        for peer in peers:
            if why := peer.missing():
                turns.leave_out(peer.name, why)
                continue
            setting = Setting(
                payload, readers, workspace.folder, workspace.prefix, workspace.new_name()
            )
            with turns.or_left_out(peer.name):
                session = Session(writer_main, peer, setting, open_seconds=peer.open_seconds)
                turns.add(peer.name, _Turn(stack.enter_context(session)))
        for number in range(rounds):
            turns.take(number)
    return result
