"""Finished jobs of a tier, each handed out exactly once.

A signal's handler runs, and may raise, between two instructions of the interpreter, but only where
Python is called or returns from a call. So the instructions that hand the reports over contain no
call: whatever interrupts `take` comes before them, and the reports stay; or after its `return`, and
the caller has them. Threads change at the same places, so none comes between either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from memlane.tiers.tier import Done


class Wakes(Protocol):
    """Something with a descriptor."""

    @property
    def wake(self) -> Callable[[], object]:
        """A C function that makes the descriptor readable; a handler that raises could skip a part
        of one in Python."""


class Reports:
    """Reports that nobody has taken yet.

    Attributes:
        waiting: the reports, in the order in which the jobs finished. Native code appends to it.
    """

    def __init__(self, wakes: Wakes | None = None) -> None:
        """`wakes`: what waits for reports; None: they are taken by the call that adds them."""
        self.waiting: list[Done] = []
        self._wakes = wakes

    def add(self, done: Done) -> None:
        """Adds a report, and makes the descriptor readable."""
        self.waiting.append(done)
        if self._wakes is not None:
            self._wakes.wake()

    def take(self, collect: Callable[[], object]) -> list[Done]:
        """Returns all reports, and removes them.

        Args:
            collect: called first; it adds what has finished meanwhile, and clears the descriptor.
                If it raises, or is interrupted, the reports stay and the descriptor is readable.
        """
        try:
            collect()
        except BaseException:
            if self._wakes is not None:
                self._wakes.wake()
            raise
        nothing: list[Done] = []
        done, self.waiting = self.waiting, nothing
        return done

    def each(self) -> Iterator[Done]:
        """Yields the reports one by one. Each is removed once the next is asked for: one whose
        handling was interrupted comes again."""
        while self.waiting:
            yield self.waiting[0]
            del self.waiting[0]
