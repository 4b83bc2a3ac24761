"""Awaits an end in an event loop of asyncio's, by its descriptor: no executor, no polling."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from math import inf
from typing import TYPE_CHECKING, TypeVar

from memlane._base.deadline import Deadline
from memlane._base.descriptors import duplicate
from memlane._base.diagnosis import Stall
from memlane._base.lifetime import undone_by
from memlane.broadcast.watching import NOW
from memlane.errors import ConcurrentUse, TimedOut, system_fault

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane.broadcast.watching import AwaitableEnd

Result = TypeVar("Result")

_AT_ONCE = 32  # calls, until the other tasks have a turn even if none of these has to wait


class _Turn:
    """One call that is awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiter: asyncio.Future[None] | None = None
        self._task = asyncio.current_task(loop)
        self._cancels = 0 if self._task is None else self._task.cancelling()

    def is_over(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Returns whether it attempts nothing more: its loop is closed, or its task was cancelled,
        even if that has not run since. Only the task's own `loop` knows of that."""
        if self._task is None or loop is not self.loop:
            return self.loop.is_closed()
        return self._task.cancelling() > self._cancels


class Awaiting:
    """Awaits calls of one end. A coroutine that is cancelled has called nothing.

    The loop that waited last keeps a descriptor registered, so that a message costs it no further
    system call, until it is readable and nobody waits.
    """

    def __init__(self, end: AwaitableEnd) -> None:
        self._end = end
        self._signal = end.signal()
        self._registered: _Registered | None = None  # for the loop that waited last
        self._turn: _Turn | None = None
        self._calls = 0

    async def call(
        self, attempt: Callable[[], Result], timeout: float | None, *, is_send: bool
    ) -> Result:
        """Returns what `attempt`, whose timeout is `NOW`, returns once it does not time out.

        Args:
            timeout: in seconds.
            is_send: it is attempted at once, because only that shows what the message needs; and a
                long wait is worth a line in the log.

        Raises:
            TimedOut: after `timeout`.
            ConcurrentUse: another coroutine awaits this end.
            MemlaneError: as `attempt`.
        """
        deadline = Deadline(timeout)
        self._end.check()
        loop = asyncio.get_running_loop()
        if self._turn is not None:
            if not self._turn.is_over(loop):
                raise ConcurrentUse("another coroutine awaits this queue; one at a time may")
            if self._turn.waiter is not None:
                self._end.show_waiting(False, False)
        stall = Stall(self._end.stall_line) if is_send else None
        turn = _Turn(loop)
        self._turn = turn  # directly before `try`: a signal handler may raise at any call
        try:
            self._calls += 1
            if self._calls % _AT_ONCE == 0:
                await asyncio.sleep(0)
            is_first = True
            while True:
                is_over = deadline.has_passed()
                if is_over or (is_send and is_first) or self._signal.is_readable:
                    try:
                        return attempt()
                    except TimedOut as error:
                        if error.timeout is not NOW:
                            raise
                    if is_over:
                        raise self._end.timed_out(timeout)
                await self._until_readable(turn, deadline, stall, is_first=is_first)
                is_first = False
        finally:
            if self._turn is turn:
                self._turn = None

    async def _until_readable(
        self, turn: _Turn, deadline: Deadline, stall: Stall | None, *, is_first: bool
    ) -> None:
        """Or until the deadline, or until there is something to log."""
        loop = turn.loop
        if self._registered is None or self._registered.loop is not loop:
            self._register(loop)
        seconds = deadline.timeout_left()
        if stall is not None:
            stall.report()
            seconds = stall.due(inf if seconds is None else seconds)
        waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _end, waiter)
        turn.waiter = waiter
        try:
            self._end.show_waiting(True, is_first)
            await waiter
        finally:
            turn.waiter = None
            if self._turn is turn:  # else another call has begun since this was cancelled
                self._end.show_waiting(False, False)
            if timer is not None:
                timer.cancel()

    def _register(self, loop: asyncio.AbstractEventLoop) -> None:
        new = _Registered(loop, self._signal.fileno())
        with undone_by(new.end):
            loop.add_reader(new.descriptor, self._on_readable, new)
        old, self._registered = self._registered, new
        if old is not None:
            old.leave()

    def _on_readable(self, registered: _Registered) -> None:
        """Ends registrations that it has lost, too: a handler raised, or another loop came."""
        turn = self._turn
        if turn is not None and turn.loop is registered.loop and turn.waiter is not None:
            if self._signal.is_readable:  # else it was when the loop looked, before the last call
                _end(turn.waiter)
            return
        if self._registered is registered:
            self._registered = None
        registered.end()


class _Registered:
    """A descriptor that a loop watches: a copy, because the user may have registered the end's own.
    It is closed with this object at the latest, which the loop keeps as long as it watches."""

    def __init__(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        self.loop = loop
        try:
            self.descriptor = duplicate(descriptor)
        except OSError as error:
            self.descriptor = -1
            raise system_fault(error.errno or 0, "cannot copy a descriptor") from None

    def end(self) -> None:
        """Ends the registration; must be called in the loop's thread."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor < 0:
            return
        try:
            if not self.loop.is_closed():
                self.loop.remove_reader(descriptor)
        finally:
            os.close(descriptor)

    __del__ = end

    def leave(self) -> None:
        """Ends it from any thread: once the loop runs, or with this object if it never does."""
        with suppress(RuntimeError):  # it is closed
            self.loop.call_soon_threadsafe(self.end)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
