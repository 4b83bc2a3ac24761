"""Requests to a remote tier, and the batches that its workers execute. Data only: who may change a
field is said beside it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Literal

import numpy as np
import numpy.typing as npt

from memlane.tiers.tier import Ticket

LATE = "the deadline has passed"

Kind = Literal["store", "load"]
OrderKind = Literal["forget", "clear"]


@dataclass(eq=False)
class Call:
    """A `store` or a `load`. The dispatcher's thread changes it; workers write to its rows."""

    ticket: Ticket
    kind: Kind
    digests: list[bytes]
    rows: npt.NDArray[np.int32]
    begun: float
    deadline: float
    ok: npt.NDArray[np.bool_]
    left: int  # blocks without an outcome
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False  # set with the lock: from then on its rows are the caller's
    error: str | None = None
    nbytes: int = 0


@dataclass(eq=False)
class Question:
    """Asks whether keys are there. Nobody waits for it: the answers are remembered."""

    digests: list[bytes]
    deadline: float
    begun: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class Awaited:
    """A request whose caller waits for its end."""

    # SimpleQueue is written in C: a handler that raises in a wait of `threading` may leave a lock
    # held.
    ended: SimpleQueue[None] = field(default_factory=SimpleQueue, init=False)
    error: str | None = field(default=None, init=False)

    def wait(self, seconds: float) -> bool:
        """Returns whether it has ended, after at most so many seconds."""
        with suppress(Empty):
            self.ended.get(timeout=seconds)
            return True
        return False


@dataclass(eq=False)
class Order(Awaited):
    """Removes keys, or everything. It comes after the stores that were begun before it."""

    kind: OrderKind
    digests: list[bytes]
    deadline: float
    waits_for: set[Ticket] = field(default_factory=set)  # stores that have not ended
    is_refused: bool = False  # the error is the server's answer


@dataclass(eq=False)
class Drain(Awaited):
    """Ends when nothing is under way."""


Work = Call | Question | Order
Request = Work | Drain


@dataclass(eq=False)
class Batch:
    """A part of a request that one worker does at once. The worker fills in what became of it, and
    then gives it back.

    Attributes:
        outcomes: for each block True; False if it is not there; or the reason why not.
        unanswered: why there are no outcomes: the server did not answer.
        waited: seconds for which an answer was awaited that did not come.
        refused: why the server will not answer a question, or do what it was ordered.
    """

    of: Work
    places: range
    outcomes: Sequence[bool | str] = ()
    unanswered: str | None = None
    waited: float = 0.0
    refused: str | None = None

    @property
    def digests(self) -> list[bytes]:
        return self.of.digests[self.places.start : self.places.stop]

    def is_late(self) -> bool:
        """Returns whether its own deadline has kept it from being done."""
        return [*self.outcomes] == [LATE] * len(self.places)

    def end(self, outcome: str) -> None:
        """Gives all blocks the same reason."""
        self.outcomes = [outcome] * len(self.places)
