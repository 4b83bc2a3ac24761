"""A remote tier's knowledge of which keys are there. The dispatcher's thread writes; callers read,
and say which keys they have read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_BELIEVED = 1.0  # seconds for which an answer is believed
_UNREAD = 10.0  # the same until it is read: an engine's step may take long
_MANY = 4096  # answers, beyond which old ones are dropped


@dataclass(eq=False, slots=True)
class _Answer:
    is_there: bool
    since: float
    until: float  # it is believed


class Answers:
    """Answers by key, each believed for a second after it was read."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Answer] = {}
        self._asking: set[bytes] = set()
        self._cleared = 0.0  # when everything was removed
        self._tidied = 0.0

    # Any thread ----------------------------------------------------------------------------------

    def read(self, digests: Sequence[bytes], now: float) -> tuple[list[bool | None], list[bytes]]:
        """Returns what is known of each key, and those that nobody knows or has asked for."""
        found: list[bool | None] = []
        unknown = []
        for digest in digests:
            answer = self._known.get(digest)
            if answer is not None and answer.until > now:
                answer.until = min(answer.until, now + _BELIEVED)
                found.append(answer.is_there)
                continue
            found.append(None)
            if digest not in self._asking:
                unknown.append(digest)
        return found, unknown

    # The dispatcher's thread ---------------------------------------------------------------------

    def begin(self, digests: Iterable[bytes]) -> list[bytes]:
        """Marks keys as asked for. Returns those that were not."""
        new = [digest for digest in digests if digest not in self._asking]
        self._asking.update(new)
        return new

    def end(
        self, digests: Sequence[bytes], answers: Sequence[bool], begun: float, now: float
    ) -> None:
        """Remembers answers to a question that was begun then. What was stored or removed since is
        known better."""
        for digest, is_there in zip(digests, answers, strict=True):
            known = self._known.get(digest)
            since = self._cleared if known is None else known.since
            if since < begun:
                self._known[digest] = _Answer(is_there, now, now + _UNREAD)
        self._asking.difference_update(digests)
        self.tidy(now)

    def learn(self, digest: bytes, is_there: bool, now: float) -> None:
        """Remembers what a store, a load or a removal has shown."""
        self._known[digest] = _Answer(is_there, now, now + _BELIEVED)

    def clear(self, now: float) -> None:
        """Everything was removed: what is known is not true any more."""
        self._known.clear()
        self._cleared = now

    def tidy(self, now: float) -> None:
        """Drops what is not believed any more, once in a while."""
        if len(self._known) > _MANY and now >= self._tidied + _BELIEVED:
            self._tidied = now
            self._known = {key: each for key, each in self._known.items() if each.until > now}
