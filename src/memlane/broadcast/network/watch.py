"""Descriptors for select, epoll and asyncio that say when a call on a remote end would not wait."""

from __future__ import annotations

import os
from contextlib import suppress

from memlane._base.descriptors import new_event
from memlane._native import fork_generation
from memlane.errors import system_fault


class NetworkWatch:
    """Readable as its end has last shown, and for ever once that has ended."""

    _event = -1

    def __init__(self) -> None:
        """Raises SystemFault if there is no descriptor left."""
        self._generation = fork_generation()
        self._is_shown: bool | None = False  # None: it is changing, or that was interrupted
        self._is_over = False
        try:
            self._event = new_event()
        except OSError as error:
            raise system_fault(error.errno or 0, "cannot open an eventfd") from None

    def __del__(self) -> None:
        if self._event >= 0:
            os.close(self._event)

    def fileno(self) -> int:
        return self._event

    @property
    def is_readable(self) -> bool:
        """In a forked child always: the call says why."""
        is_here = self._generation == fork_generation()
        return self._is_shown is not False or self._is_over or not is_here

    def show(self, is_ready: bool) -> None:
        """With the lock of its end held."""
        if is_ready is self._is_shown:
            return
        self._is_shown = None
        if is_ready:
            os.eventfd_write(self._event, 1)
        else:
            with suppress(BlockingIOError):
                os.eventfd_read(self._event)
            if self._is_over:  # since: what was read may have been its word
                self.end()
        self._is_shown = is_ready

    def end(self) -> None:
        """From any thread, and from a signal handler."""
        self._is_over = True
        os.eventfd_write(self._event, 1)
