"""Messages a second, from one look at the segments to the next.

Without rich: while it is imported, a tenth of a second, the messages pass that `ls` counts.
"""

from __future__ import annotations

import time

from memlane.inspect import Segment, segments


class Rates:
    """Messages a second of each queue, from one look to the next."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[float, int]] = {}

        self._looked = 0.0

    def first(self) -> None:
        """A look of its own, so that the next gives rates."""
        self.of(segments(), time.monotonic())

    def rest(self, seconds: float) -> None:
        """Waits until the last look is so long ago."""
        time.sleep(max(0.0, self._looked + seconds - time.monotonic()))

    def of(self, seen: list[Segment], now: float) -> dict[str, float]:
        """Messages a second by queue, objects put a second by store, for those seen before."""
        found = {}
        self._looked = now
        for segment in seen:
            count = messages(segment)
            if count is None:
                continue
            if segment.name in self._before:
                at, before = self._before[segment.name]
                found[segment.name] = max(0.0, (count - before) / max(now - at, 1e-3))
            self._before[segment.name] = (now, count)
        return found


def messages(segment: Segment) -> int | None:
    """Returns the messages published; of a store the objects put, of a tier the accesses."""
    if segment.kind == "store":
        return segment.counters["puts"]
    if segment.kind == "tier":
        return segment.counters["accesses"]
    if segment.kind == "queue" and segment.participants:
        return segment.participants[0].position
    return None
