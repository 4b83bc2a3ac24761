"""Counts over all looks of an observer, which outlives what it looks at."""

from __future__ import annotations

import time
from collections.abc import Iterable

from memlane.errors import MemlaneError
from memlane.inspect.looks import Look, Looks
from memlane.inspect.segment import Segment

Key = tuple[str, str, int | None, int | None, int | None]


class Tally:
    """Counts of one observer since it began.

    Attributes:
        deaths: of participants, by what people call the queue (empty: nothing) and role; 0 for
            those that were seen, so that the first death is an increase.
        errors: looks that failed.
        seconds: that the last look took.
    """

    def __init__(self) -> None:
        self.deaths: dict[tuple[str, str], int] = {}
        self.errors = 0
        self.seconds = 0.0
        self._dead: set[Key] = set()  # as of the last look, counted

    def note(self, segments: Iterable[Segment], seconds: float) -> None:
        """Counts what a look that took so long has seen; each death once."""
        dead: set[Key] = set()
        for queue in segments:
            if queue.kind != "queue":
                continue
            for who in queue.participants:
                of = queue.label, who.role
                self.deaths.setdefault(of, 0)
                key = queue.name, who.role, who.rank, who.pid, who.start_ticks
                if who.state == "dead":
                    dead.add(key)
                    self.deaths[of] += key not in self._dead
        self._dead, self.seconds = dead, seconds

    def note_error(self) -> None:
        """Counts a look that failed."""
        self.errors += 1


def taken(looks: Looks, tally: Tally) -> Look:
    """A look, counted. Raises as `memlane.inspect.segments`."""
    began = time.monotonic()
    try:
        look = looks.take()
    except (MemlaneError, OSError):
        tally.note_error()
        raise
    tally.note(look.segments, look.at - began)
    return look
