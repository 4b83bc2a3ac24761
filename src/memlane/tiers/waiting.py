"""Descriptors that wake a waiting thread, and when to try again what has failed. No tier, no I/O
but that of an eventfd."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from memlane._base.descriptors import new_event

LONGEST_PAUSE = 60.0
"""Seconds between two attempts to reach what does not answer, and between two lines about it."""


class Wakeup:
    """A descriptor that is readable from `wake` until `clear`.

    It is closed with its last reference, because a thread may wait for it while another closes its
    owner.

    Attributes:
        descriptor: an eventfd.
        wake: makes it readable. A C function: a handler that raises cannot skip a part of it.
    """

    def __init__(self) -> None:
        self.descriptor = new_event()
        self.wake: Callable[[], object] = partial(os.eventfd_write, self.descriptor, 1)

    def clear(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class Outage:
    """The time in which something that fails is not tried: a second, then two, four, ... a minute.

    Attributes:
        until: when it may be tried again, on the caller's clock in seconds; 0 while it works.
    """

    def __init__(self) -> None:
        self.until = 0.0
        self._pause = 0.0
        self._silent_until = 0.0

    def begin(self, now: float) -> bool:
        """Records a failure. Returns whether to log it: when an outage begins, at most once a
        minute."""
        if self.until > now:
            return False
        is_new = self._pause == 0.0 and now >= self._silent_until
        if is_new:
            self._silent_until = now + LONGEST_PAUSE
        self._pause = min(LONGEST_PAUSE, 2 * self._pause or 1.0)
        self.until = now + self._pause
        return is_new

    def end(self) -> None:
        """Records a success."""
        self._pause = self.until = 0.0

    @property
    def is_open(self) -> bool:
        """True if it has failed and has not succeeded since."""
        return self._pause > 0.0

    def lasts(self, now: float) -> bool:
        """Returns whether it must not be tried yet."""
        return self.until > now
