"""A chain's lock, under which one thread at a time takes what the tiers report, and the only waits
for them."""

from __future__ import annotations

import select
import time
from collections.abc import Callable
from contextlib import suppress
from weakref import WeakSet

from memlane._base.deadline import Deadline
from memlane._locks import Lock
from memlane.errors import MemlaneError
from memlane.tiers.linked import Link
from memlane.tiers.moves import Moves
from memlane.tiers.waiting import Wakeup

_MOST_WAIT = 3600.0  # seconds, of one wait


class Progress:
    """Takes reports into `moves`, and wakes the calls that wait for them.

    Attributes:
        lock: held around every use of the moves. A signal's handler may raise anywhere: it is taken
            by `with` alone.
    """

    def __init__(self, moves: Moves) -> None:
        self.lock = Lock()
        self._moves = moves
        self._waiting: WeakSet[Wakeup] = WeakSet()  # of calls under way; changed with the lock

    @property
    def is_interrupted(self) -> bool:
        """True if this is called by a signal's handler, or by a tier, in the middle of a change:
        this thread has the lock already."""
        return self.lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def wait(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """Takes reports until that is so, or the deadline."""
        if self.is_interrupted:
            return is_done()
        wakeup: Wakeup | None = None
        try:
            while True:
                self.advance(self._moves.links)
                with self.lock:
                    if is_done():
                        return True
                now = time.monotonic()
                if deadline.end <= now:
                    return False
                if wakeup is None:
                    wakeup = Wakeup()
                    with self.lock:
                        self._waiting.add(wakeup)
                    continue  # for what another thread took before there was a wakeup
                ready = select.poll()
                ready.register(wakeup.descriptor, select.POLLIN)
                for link in self._moves.links:
                    is_at_work = self._moves.searches or link.all_jobs
                    if is_at_work and not link.poll_outage.lasts(now):
                        with suppress(MemlaneError):  # it is closed: the next turn ends its jobs
                            ready.register(link.tier.fileno(), select.POLLIN)
                dues = [search.due for search in [*self._moves.searches]]
                until = min([deadline.end, *dues, *(link.wakes_at() for link in self._moves.links)])
                ready.poll(1000 * min(_MOST_WAIT, max(0.0, until - now)))
                wakeup.clear()
        finally:
            if wakeup is not None:  # a weak reference still gives it while its last one closes it
                with self.lock:
                    self._waiting.discard(wakeup)

    def advance(self, links: list[Link]) -> None:
        """Takes the reports of these tiers."""
        if self.is_interrupted:
            return
        has_any, moves = True, self._moves  # also if it is interrupted
        try:
            with self.lock:
                now = time.monotonic()
                has_any = sum(moves.take_reports(link, now) for link in links) > 0
                has_any |= moves.go_on(now)
                if has_any or moves.backing.aside() != moves.jobs.kept_rows():
                    moves.reclaim()
        finally:
            if has_any:
                with self.lock:
                    waiting = [*self._waiting]
                for wakeup in waiting:
                    wakeup.wake()
