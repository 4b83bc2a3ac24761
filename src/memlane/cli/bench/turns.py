"""The peers of a cell take turns: each once per round, in an order that rotates by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from memlane.cli.bench.results import CellResult, Figures

Say = Callable[[str], None]


class Turn(Protocol):
    """One peer's open session; `take` measures and adds to its figures."""

    @property
    def figures(self) -> Figures: ...
    def take(self) -> None: ...


class Turns:
    """Peers that fail or hang are reported and left out of the result."""

    def __init__(self, result: CellResult, say: Say) -> None:
        self._result = result
        self._say = say
        self._turns: dict[str, Turn] = {}

    def add(self, name: str, turn: Turn) -> None:
        self._turns[name] = turn
        self._result.peers[name] = turn.figures

    def take(self, number: int) -> None:
        """Runs round `number`."""
        names = list(self._turns)
        start = number % max(len(names), 1)
        for name in names[start:] + names[:start]:
            with self.or_left_out(name):
                self._turns[name].take()

    @contextmanager
    def or_left_out(self, name: str) -> Iterator[None]:
        """Leaves the peer out if the block raises."""
        try:
            yield
        except Exception as error:
            self.leave_out(name, error)

    def leave_out(self, name: str, why: object) -> None:
        self._turns.pop(name, None)
        self._result.peers.pop(name, None)
        self._result.skipped[name] = str(why)
        self._say(f"  {name} is left out: {why}")
