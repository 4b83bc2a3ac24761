"""The readers on the host of a writer that also has remote ones: those of its ring, or none."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from memlane._base.diagnosis import failure
from memlane.errors import Closed, TimedOut

if TYPE_CHECKING:
    from memlane._base.deadline import Deadline
    from memlane.broadcast.local import LocalWriter
    from memlane.broadcast.network.driver import Asked
    from memlane.broadcast.starting import Starting
    from memlane.broadcast.statistics import ReaderStatistics


class _Elsewhere:
    """The `watch` of a wait for the readers here: raises if one on another host dies, or a process
    of `starting`."""

    def __init__(self, remote: Asked, starting: Starting | None) -> None:
        self._watches: list[Asked] = [remote] if starting is None else [remote, starting]
        self.pids = [] if starting is None else starting.pids

    def is_set(self) -> bool:
        return any(watch.is_set() for watch in self._watches)


class Here:
    """The ring of a writer, and what is known of its readers after it was closed.

    Attributes:
        ring: None if there are no readers on this host.
    """

    def __init__(self, ring: LocalWriter | None) -> None:
        self.ring = ring
        self._never_came: list[str] | None = None
        self._absent_elsewhere = 0

    def ring_of(self, rank: int | None) -> LocalWriter | None:
        """The ring, if it is that of reader `rank`."""
        has_it = self.ring is not None and rank in self.ring.native.ranks
        return self.ring if has_it else None

    def absent(self) -> list[str]:
        """The readers that have not attached, or had not when this end closed."""
        if self._never_came is not None:
            return self._never_came
        return [] if self.ring is None else self.ring.absent()

    def note_absent_elsewhere(self, count: int) -> None:
        """Lets the readers here know how many remote ones have yet to attach."""
        if count != self._absent_elsewhere:
            if self.ring is not None:
                self.ring.note_absent_elsewhere(count)
            self._absent_elsewhere = count  # last: what is interrupted is done again

    def pids(self) -> set[int]:
        """Returns the pids of all readers here that have ever attached."""
        return set() if self.ring is None else self.ring.pids()

    def raise_death(self) -> None:
        """Raises ReaderDied if a reader here died."""
        if self.ring is not None:
            self.ring.raise_death()

    def deserted(self) -> tuple[float, list[int]] | None:
        """Returns since when nobody here reads any more, 0 if nobody ever did, and the ranks of
        those who did; None while somebody does."""
        if self.ring is None:
            return 0.0, []
        with suppress(Closed):  # by another thread
            if (since := self.ring.native.deserted_since) is not None:
                return since / 1e9, list(self.ring.native.ranks)
        return None

    def wait_until_ready(
        self, deadline: Deadline, timeout: float | None, remote: Asked, starting: Starting | None
    ) -> None:
        """Waits until all readers here have attached; `timeout` is what the caller has asked for.
        `remote` notices deaths elsewhere, and `starting` those of processes."""
        if self.ring is None:
            return
        native = self.ring.native
        try:
            native.wait_until_ready(deadline.left(), _Elsewhere(remote, starting))
        except TimedOut:
            raise failure(native, "not_ready", 0, timeout) from None

    def statistics(self) -> tuple[tuple[ReaderStatistics, ...], int, int]:
        """Returns the rows of the readers here, and the ring's waits and spills."""
        if self.ring is None:
            return (), 0, 0
        seen = self.ring.statistics()
        return seen.readers, seen.waits, seen.spills

    def close(self) -> None:
        """Closes the ring; from now on nobody here can attach."""
        if self.ring is not None:
            absent = self.ring.absent()
            if self._never_came is None:  # else another thread has closed it: nobody is absent then
                self._never_came = absent
            self.ring.close()

    def abandon(self) -> None:
        if self.ring is not None:
            self.ring.abandon()
