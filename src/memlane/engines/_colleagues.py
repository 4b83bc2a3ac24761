"""A wait for one worker's answer hears of the death of any worker.

Workers answer through queues of their own, and an engine reads only one of them, though the others
work for that answer, too. So a handle says which queues its writer reads, and a wait for an
answer looks after the readers of those queues that it writes itself.
"""

from __future__ import annotations

import logging
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from memlane._failures import names_of
from memlane._settings import warning_interval
from memlane.errors import Closed, ReaderDied

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memlane.broadcast import MessageQueue, ReaderStatistics

logger = logging.getLogger("memlane")

_LOOK = 0.05  # seconds between two looks at least
_LONGEST_PAUSE = 60.0  # between two lines

# The ends in this process, by the id of their queue. A forked child has none of them.
written: WeakValueDictionary[str, MessageQueue] = WeakValueDictionary()
read: WeakValueDictionary[str, MessageQueue] = WeakValueDictionary()


def ids_read() -> set[str]:
    """Of the queues that this process reads; other threads may open some meanwhile."""
    ends = [ref() for ref in read.valuerefs()]
    return {end.handle.queue_id for end in ends if end is not None}


def _forget() -> None:
    written.clear()
    read.clear()


os.register_at_fork(after_in_child=_forget)


class Watch:
    """What a read gets as its `cancel`, and asks every 100 ms while it waits."""

    def __init__(self, queue_ids: Sequence[str]) -> None:
        """`queue_ids`: what the writer of the queue that is read reads itself."""
        self.is_shut_down = False
        self._ids = queue_ids
        self._looked_at = 0.0
        self.begin(False)

    def begin(self, is_idle: bool) -> None:
        """A read begins; an idle one may last, and says nothing."""
        self._is_idle = is_idle
        self._began: float | None = None

    def is_set(self) -> bool:
        """Raises ReaderDied for a colleague; a message that has come is delivered before."""
        now = time.monotonic()
        if self._ids and not self.is_shut_down and now - self._looked_at >= _LOOK:
            self._looked_at = now
            self._look(now)
        return self.is_shut_down

    def _look(self, now: float) -> None:
        if self._began is None:
            self._began, self._pause = now, warning_interval()
            self._speaks_at = now + self._pause
        colleagues: list[ReaderStatistics] = []
        for queue_id in self._ids:
            queue = written.get(queue_id)
            if queue is not None:
                with suppress(Closed):
                    colleagues += queue.statistics().readers
        for who in colleagues:
            if who.state == "dead":
                raise ReaderDied(who.rank, who.pid or 0, ", and the others wait for it")
        if colleagues and not self._is_idle and now >= self._speaks_at:
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._speaks_at = now + self._pause
            logger.warning("%s", _line(colleagues, now, now - self._began))


def _line(colleagues: list[ReaderStatistics], now: float, waited: float) -> str:
    """The culprit first: workers that cannot run, then the longest silent."""
    colleagues.sort(key=lambda who: (who.state == "running", who.last_progress or 0.0))
    names = [
        f"reader {who.rank} (pid {who.pid}, {who.state}, last progress "
        f"{now - (who.last_progress or now):.1f} s ago)"
        for who in colleagues
    ]
    return (
        f"{names_of(names)} kept pid {os.getpid()} waiting for an answer for {waited:.1f} s: "
        f"No available shared memory broadcast block"
    )
