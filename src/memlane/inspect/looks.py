"""Looks at the segments again and again. Who holds which files costs most, as all processes of the
machine are asked, so it is found out anew only now and then."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from memlane.inspect.segment import Found, Known, Segment, files, joined, look, named_files, opened
from memlane.inspect.waits import Wait, seen_waits

_SEARCH_PAUSE = 1.0  # seconds between two searches at least


@dataclass(frozen=True)
class Look:
    """The result of one look.

    Attributes:
        at: when, on the clock of `time.monotonic()`.
        segments: sorted by name.
        waits: those that have lasted for longer than `after`, the longest first.
    """

    at: float
    segments: list[Segment]
    waits: list[Wait]


class Looks:
    """Many looks at all segments of this user, or at those that one process holds.

    Args:
        pid: of that process.
        after: seconds that a wait must have lasted to be shown.
        search_every: seconds after which a look finds out anew who holds what. New segments with a
            name are seen at once; others, and changes of `pids` and `keepers`, then.
    """

    def __init__(
        self, pid: int | None = None, after: float = 1.0, search_every: float = 10.0
    ) -> None:
        self._pid, self._after, self._search_every = pid, after, search_every
        self._known = Known()
        self._files: dict[int, Found] = {}
        self._seen: set[int] = set()  # inodes, by the last look
        self._searched = float("-inf")
        self._owes_search = False  # a file was missed

    def search(self) -> None:
        """Finds out who holds which files; may run in a thread of its own. Raises as `segments`."""
        self._searched = time.monotonic()
        self._owes_search = False
        found = {}
        for each in files(self._pid):
            with opened(each) as file:
                if file is not None:
                    found[os.fstat(file).st_ino] = each
        self._files = found

    def take(self) -> Look:
        """Raises as `segments`."""
        if time.monotonic() - self._searched >= self._search_every:
            self.search()
        seen = self._look()
        if self._owes_search and time.monotonic() - self._searched >= _SEARCH_PAUSE:
            self.search()
            seen = self._look()
        seen.sort(key=lambda segment: segment.name)
        return Look(time.monotonic(), seen, seen_waits(seen, self._after))

    def _look(self) -> list[Segment]:
        found = dict(self._files)
        if self._pid is None:
            for inode, new in named_files().items():
                found.setdefault(inode, new)
        self._known.begin(set(found))
        seen: list[Segment] = []
        if not self._seen <= found.keys():  # most often its name was removed when all had attached
            self._owes_search = True
        self._seen = set(found)
        for inode, each in found.items():
            with opened(each) as file:
                if file is None or os.fstat(file).st_ino != inode:
                    self._owes_search = True
                    continue
                segment = look(file, each, self._known)
                if segment is not None:
                    seen.append(segment)
        return joined(seen)
