"""The guard around calls on an end that is written in Python: one at a time."""

from __future__ import annotations

import sys
from threading import get_ident

from memlane._native import CallGuard


class Guard(CallGuard):
    """A CallGuard that is free again if `with` does not enter its block; see `memlane._locks`."""

    if sys.version_info >= (3, 14):

        def __enter__(self) -> None:
            before = self.thread
            try:
                super().__enter__()
            except BaseException:
                if before != self.thread == get_ident():
                    self.__exit__(None, None, None)
                raise
