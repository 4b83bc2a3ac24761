"""A wait that lasts says in the log whom it waits for: the culprit first.

Called by the native waits only, after every 100 ms slice (`native/bindings/end.hpp`).
"""

from __future__ import annotations

import logging
import os
import time

from memlane._failures import (
    End,
    absent_readers,
    blocking_readers,
    names_of,
    participant,
    writer_of,
)

logger = logging.getLogger("memlane")

INTERVAL_SETTINGS = ("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "VLLM_RINGBUFFER_WARNING_INTERVAL")
DEFAULT_INTERVAL = 5.0
LONGEST_INTERVAL = 60.0


def warning_interval() -> float:
    """Seconds until a wait is first worth a line, a fraction if you like."""
    for name in INTERVAL_SETTINGS:
        text = os.environ.get(name)
        if text:
            try:
                seconds = float(text)
            except ValueError:
                seconds = -1.0
            if seconds > 0:
                return seconds
            logger.warning(
                "%s=%r is no positive number of seconds; using %s", name, text, DEFAULT_INTERVAL
            )
            break
    return DEFAULT_INTERVAL


class Watch:
    """One wait of one end, begun a slice ago."""

    def __init__(self, end: End, wait: str) -> None:
        self._end = end
        self._wait = wait
        self._began = time.monotonic() - 0.1
        self._interval = warning_interval()
        self._next = self._began + self._interval

    def __call__(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._interval = min(2 * self._interval, LONGEST_INTERVAL)
        self._next = now + self._interval
        line = self._line(now - self._began)
        if line:
            logger.warning("%s", line)

    def _line(self, waited: float) -> str | None:
        end = self._end
        match self._wait:
            case "chunk":
                return (
                    f"{names_of(blocking_readers(end))} kept the writer (pid {os.getpid()}) "
                    f"waiting for {waited:.1f} s: No available shared memory broadcast block"
                )
            case "ready":
                return (
                    f"{names_of(absent_readers(end))} kept pid {os.getpid()} waiting for "
                    f"{waited:.1f} s: not everybody has attached to the queue"
                )
            case _:
                # An idle queue is no news; a writer that cannot write any more is.
                if participant(end, 0).state not in ("stopped", "dead"):
                    return None
                rank = end.ranks[end.slot - 1]
                return (
                    f"{writer_of(end)} kept reader {rank} (pid {os.getpid()}) waiting for "
                    f"{waited:.1f} s"
                )
