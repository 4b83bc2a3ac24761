"""A network for a test: a host beside this one, and a cable that can be pulled."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import lab


@cache
def network_refusal() -> str:
    """Why this machine refuses networks to tests; empty if it allows them."""
    return lab.refusal()


@dataclass(frozen=True)
class Neighbour:
    """Another host, connected to this one by a cable.

    Attributes:
        here: the address of this side.
        there: the address of the other side.
        command: an interpreter that runs there.
        cable: the cable, which counts its frames.
    """

    here: str
    there: str
    command: tuple[str, ...]
    cable: lab.Cable

    def pull(self) -> None:
        """Nothing goes through the cable any more; neither side is notified."""
        self.cable.pull()

    def plug(self) -> None:
        """Everything goes through again."""
        self.cable.plug()

    def lose(self, percent: float, delay_ms: float = 0.0, jitter_ms: float = 0.0) -> None:
        """Loses that share of the frames of both sides, and delays the others, with jitter."""
        self.cable.set(loss_percent=percent, delay_ms=delay_ms, jitter_ms=jitter_ms)


@contextmanager
def neighbour(seed: int = 0) -> Iterator[Neighbour]:
    """A neighbour and its cable, which exist until the end of the block."""
    with lab.Host() as host, lab.Cable(None, host, seed=seed) as cable:
        yield Neighbour(*cable.addresses, (*host.command, sys.executable), cable)
