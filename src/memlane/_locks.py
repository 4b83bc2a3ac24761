"""The lock for `with` blocks in calls that a signal handler may interrupt anywhere.

From CPython 3.14 on, handlers also run between `__enter__` and the block. If one raises there, the
block is not entered, so `__exit__` is not called, and an `RLock` would stay locked for ever. What
leaves `__enter__` by an exception is undone in there; `__exit__` is written in C, which no handler
interrupts.
"""

import sys
from _thread import RLock


class Lock(RLock):  # type: ignore[misc]  # final, says typeshed
    """An RLock that is free again if `with` does not enter its block."""

    def is_mine(self) -> bool:
        """Returns whether this thread holds it."""
        return bool(self._is_owned())  # type: ignore[attr-defined]

    if sys.version_info >= (3, 14):

        def __enter__(self) -> bool:
            depth = self._recursion_count()
            try:
                return self.acquire()
            except BaseException:
                while self._recursion_count() > depth:
                    self.release()
                raise
