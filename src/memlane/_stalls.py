"""Logs which process a long wait is waiting for.

Native waits (`native/bindings/end.hpp`) call `report` when a line is due, and import this module,
and logging with it, only then. Waits in Python use a `Stall`.
"""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from memlane._failures import Awaited, absent_readers, names_of
from memlane._settings import warning_interval

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane._failures import RingEnd

logger = logging.getLogger("memlane")

_SHORT = 0.1  # seconds: most waits are over by then, and never read the environment
_LONGEST_SILENCE = 60.0  # seconds between two lines about one wait


class Stall:
    """One wait in Python. Logs whom it waits for, at intervals that double up to a minute.

    Args:
        line: returns the text for a wait of that many seconds, or None if there is nobody to name.
    """

    def __init__(self, line: Callable[[float], str | None]) -> None:
        self._line = line
        self._started = time.monotonic()
        self._pause: float | None = None
        self._next = self._started + _SHORT

    def due(self, most: float) -> float:
        """Seconds until `report` has something to do, never more than `most`."""
        return min(most, max(0.0, self._next - time.monotonic()))

    def report(self) -> None:
        """Logs one line if one is due."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._pause is None:
            self._pause = warning_interval()
            self._next = self._started + self._pause
            if now < self._next:
                return
        self._pause = min(2 * self._pause, _LONGEST_SILENCE)
        self._next = now + self._pause
        line = self._line(now - self._started)
        if line is not None:
            logger.warning("%s", line)


def report(end: RingEnd, wait: str, waited: float) -> None:
    """Logs one line about a wait of `end` that has lasted `waited` seconds so far."""
    logger.warning("%s", _line(end, wait, waited))


def _line(end: RingEnd, wait: str, waited: float) -> str:
    match wait:
        case "chunk":
            return (
                f"{Awaited(end)} kept the writer (pid {os.getpid()}) "
                f"waiting for {waited:.1f} s: No available shared memory broadcast block"
            )
        case "ready":
            return (
                f"{names_of(absent_readers(end))} kept pid {os.getpid()} waiting for "
                f"{waited:.1f} s: not all readers have attached to the queue"
            )
        case _:
            rank = end.ranks[end.slot - 1]
            return (
                f"{Awaited(end)} kept reader {rank} (pid {os.getpid()}) waiting for {waited:.1f} s"
            )
