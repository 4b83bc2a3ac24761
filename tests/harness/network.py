"""A network for a test: a host beside this one, and a cable that can be pulled."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import lab


@cache
def network_refusal() -> str:
    """Why this machine does not let a test have a network of its own; empty if it does."""
    return lab.refusal()


@dataclass(frozen=True)
class Neighbour:
    """Another host, connected to this one by a cable.

    Attributes:
        here: the address of this side.
        there: that of the other.
        command: an interpreter that runs there.
        cable: counts what goes through it.
    """

    here: str
    there: str
    command: tuple[str, ...]
    cable: lab.Cable

    def pull(self) -> None:
        """Nothing goes through the cable any more; neither side is told."""
        self.cable.pull()

    def plug(self) -> None:
        """All goes through again."""
        self.cable.plug()

    def lose(self, percent: float, delay_ms: float = 0.0, jitter_ms: float = 0.0) -> None:
        """So much of what either side says is lost, the rest late, by a little more or less."""
        self.cable.set(loss_percent=percent, delay_ms=delay_ms, jitter_ms=jitter_ms)


@contextmanager
def neighbour(seed: int = 0) -> Iterator[Neighbour]:
    """One that is gone after the block, with its cable."""
    with lab.Host() as host, lab.Cable(None, host, seed=seed) as cable:
        yield Neighbour(*cable.addresses, (*host.command, sys.executable), cable)
