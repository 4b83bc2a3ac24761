"""Decides when to log that a server refuses blocks. Pure: the caller brings the time, and logs."""

from __future__ import annotations

from dataclasses import dataclass

from memlane.tiers.waiting import LONGEST_PAUSE

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
