"""Descriptors of doors: forked children, also those of C code, do not keep them. A child that kept
a door would keep its name alive when the process that serves it has died."""

from __future__ import annotations

import os
from collections.abc import Callable

from memlane._base.descriptors import beyond_standard_streams
from memlane._importing import fork_waits
from memlane._native import close_in_children, fork_generation, keep_in_children


class Descriptor:
    """Closed with its last reference, at the latest."""

    def __init__(self, make: Callable[[], int]) -> None:
        """`make` returns a new one. Raises what that raises."""
        self._made_in = fork_generation()
        with fork_waits:
            self._number = beyond_standard_streams(make())
            self._inode = close_in_children(self._number)

    def fileno(self) -> int:
        """Returns its number, or -1 once it is closed."""
        return self._number

    def close(self) -> None:
        """Closes it. Idempotent; has no effect in a forked child, which has done so."""
        number, self._number = self._number, -1
        if number >= 0 and fork_generation() == self._made_in:
            keep_in_children(number, self._inode)
            os.close(number)

    def __del__(self) -> None:
        if hasattr(self, "_inode"):
            self.close()
