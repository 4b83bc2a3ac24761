"""For whoever waits for a tier: a descriptor that rings, and when to try again what fails."""

from __future__ import annotations

import os
from contextlib import suppress

from memlane._base.descriptors import new_event

LONGEST_PAUSE = 60.0
"""Seconds between two attempts to reach what does not answer, and between two lines about it."""


class Bell:
    """A descriptor that is readable once it has rung. Closed with its last reference, because a
    thread may be at it while another closes its owner."""

    def __init__(self) -> None:
        self.descriptor = new_event()

    def ring(self) -> None:
        os.eventfd_write(self.descriptor, 1)

    def quiet(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)


class Outage:
    """How long something that fails is left alone: for a second, then two, four, ... a minute.

    Attributes:
        until: when it is tried again, on the caller's clock in seconds; 0 while it works.
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
        """It works."""
        self._pause = self.until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether it has failed, and has not worked since."""
        return self._pause > 0.0

    def lasts(self, now: float) -> bool:
        """Whether it is to be left alone."""
        return self.until > now
