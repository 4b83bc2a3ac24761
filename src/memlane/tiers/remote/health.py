"""Judges by its batches whether a server answers, and words what the log says of it. Pure: callers
bring the time, and log the lines that they get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memlane.tiers.remote.requests import Batch, Call
from memlane.tiers.remote.transport import FAIR, Late
from memlane.tiers.remote.worker import Line
from memlane.tiers.waiting import LONGEST_PAUSE, Outage

_MOST_KINDS = 16


@dataclass
class _Kind:
    unsaid: int = 0
    silent_until: float = 0.0


class Refusals:
    """Counts refused blocks by the first word of the reason, such as OOM or READONLY. The first of
    a kind is logged at once, later ones as a number, once a minute at most."""

    def __init__(self) -> None:
        self._kinds: dict[str, _Kind] = {}

    def record(self, reason: str, blocks: int, now: float) -> int:
        """Returns how many blocks the log is to mention now, or 0."""
        word = reason.split(" ", 1)[0]
        if word not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            word = next(iter(self._kinds))
        kind = self._kinds.setdefault(word, _Kind())
        kind.unsaid += blocks
        if now < kind.silent_until:
            return 0
        said, kind.unsaid, kind.silent_until = kind.unsaid, 0, now + LONGEST_PAUSE
        return said


class Health:
    """Begins and ends the outage of a server.

    Args:
        what: the tier, as the log names it.
    """

    def __init__(self, what: str, outage: Outage) -> None:
        self._what, self._outage = what, outage
        self._waited = 0.0  # seconds without an answer, of batches whose deadlines were short
        self._silent: set[str] = set()  # kinds of work that the server has not answered
        self._refusals = Refusals()

    def judge(self, batch: Batch, now: float) -> Iterator[Line]:
        """Notes whether the server answers; yields lines. Deadlines that were too short add up. A
        server that answers small requests and no large ones is silent until it has answered a large
        one."""
        kind = batch.of.kind if isinstance(batch.of, Call) else "small"
        self._waited += batch.waited
        has_failed = batch.unanswered is not None or (batch.waited and self._waited >= FAIR)
        if has_failed:
            if batch.waited:
                self._silent.add(kind)
            if self._outage.begin(now):
                why = batch.unanswered or str(Late())
                yield "%s does not answer (%s); it is skipped until it does", self._what, why
        if batch.unanswered is None and batch.refused is None and not batch.is_late():
            self._silent -= {kind, "small"}
            if not self._silent:
                self._outage.end()
            self._waited = 0.0
        if batch.refused is not None:
            yield from self.refused([batch.refused] * len(batch.places), now)

    def refused(self, reasons: Sequence[str], now: float) -> Iterator[Line]:
        """The server has refused blocks, one for each reason; yields lines."""
        for reason, blocks in Counter(reasons).items():
            if said := self._refusals.record(reason, blocks, now):
                yield f"the server of {self._what} has refused blocks (%d): %s", said, reason
