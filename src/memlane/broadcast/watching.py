"""Descriptors that show whether a call of an end would return at once, and the methods of an end
that awaiting uses. Knows no kind of end."""

from __future__ import annotations

import os
import select
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from memlane._base.descriptors import duplicate, new_event
from memlane._native import fork_generation
from memlane.errors import system_fault

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from memlane.errors import MemlaneError

NOW = float("0")
"""The timeout of an attempt of a call that is awaited, and of its TimedOut: that of an error of a
message's own is another object."""


class Watching(Protocol):
    """A descriptor for select and epoll, kept open as long as this object."""

    def fileno(self) -> int: ...
    @property
    def is_readable(self) -> bool: ...


class AwaitableEnd(Protocol):
    """The methods of an end that `await` uses."""

    def check(self) -> None: ...

    def signal(self) -> Watching:
        """A signal whose descriptor is readable once a call should be attempted, and for ever once
        this end is closed. An attempt, or `is_readable`, makes it quiet."""

    def show_waiting(self, is_waiting: bool, is_first: bool) -> None:
        """Somebody waits for this end, though in no call of it; `is_first`: since the coroutine's
        call has begun."""

    def stall_line(self, waited: float) -> str | None:
        """The line that the log gets about a call that has waited that many seconds."""

    def timed_out(self, timeout: float | None) -> MemlaneError:
        """The error of a call that has waited that long in vain."""


class ReceivingEnd(AwaitableEnd, Protocol):
    """An end that receives."""

    @property
    def receive(self) -> Callable[[float | None, threading.Event | None, bool], Any]: ...
    def receive_many(
        self, timeout: float | None, cancel: threading.Event | None, lends: bool, most: int
    ) -> list[Any]:
        """Waits as `receive`; returns what is there, at least one and at most `most` objects."""

    def watch(self) -> Watching:
        """A watch whose descriptor is readable while a call would not wait, and for ever once this
        end is closed."""


class ShownWatch:
    """Readable as its end has last shown, and for ever once that has ended."""

    _event = -1

    def __init__(self) -> None:
        """Raises SystemFault if there is no descriptor left."""
        self._generation = fork_generation()
        self._is_shown: bool | None = False  # None: it is changing, or that was interrupted
        self._is_over = False
        self._event = new_event()

    def __del__(self) -> None:
        if self._event >= 0:
            os.close(self._event)

    def fileno(self) -> int:
        return self._event

    @property
    def is_readable(self) -> bool:
        """Always true in a forked child, where the call says why."""
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


class JointWatch:
    """Readable while any of its parts is; its descriptor stays when they change."""

    def __init__(self, *parts: Watching) -> None:
        """Raises SystemFault if there is no descriptor left."""
        self._parts: tuple[Watching, ...] = ()
        try:
            with select.epoll() as made:
                self._epoll = select.epoll.fromfd(duplicate(made.fileno()))
        except OSError as error:
            raise system_fault(error.errno or 0, "cannot open an epoll descriptor") from None
        self.become(*parts)

    def become(self, *parts: Watching) -> None:
        """Raises SystemFault, and changes nothing, if the system refuses."""
        old, self._parts = self._parts, (*self._parts, *parts)  # whose descriptors stay open
        try:
            for part in parts:
                with suppress(FileExistsError):
                    self._epoll.register(part.fileno(), select.EPOLLIN)
        except OSError as error:
            self._leave([part for part in parts if part not in old])
            self._parts = old
            raise system_fault(error.errno or 0, "cannot watch a descriptor") from None
        self._leave([part for part in old if part not in parts])
        self._parts = parts

    def _leave(self, parts: list[Watching]) -> None:
        for part in parts:
            with suppress(FileNotFoundError):  # a signal handler has raised here before
                self._epoll.unregister(part.fileno())

    def fileno(self) -> int:
        return self._epoll.fileno()

    @property
    def is_readable(self) -> bool:
        return any(part.is_readable for part in self._parts)
