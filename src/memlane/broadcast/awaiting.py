"""Awaits an end in an event loop of asyncio's, by its descriptor: no executor, no polling."""

from __future__ import annotations

import asyncio
import fcntl
import os
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from memlane._base.deadline import Deadline
from memlane._base.diagnosis import Stall
from memlane.errors import ConcurrentUse, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane.broadcast.local import LocalEnd

Result = TypeVar("Result")

NOW = float("0")
"""The timeout of an attempt, and of its TimedOut: an error of a message's own has another."""

_AT_ONCE = 32  # calls that need not wait, until the other tasks have a turn


class _Turn:
    """One call that is awaited."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waiter: asyncio.Future[None] | None = None


class Awaiting:
    """Awaits calls of one end. A coroutine that is cancelled has called nothing.

    The loop that waited last keeps a descriptor registered, so that a message costs it no further
    system call, until it is readable and nobody waits. It is a copy: the user may have registered
    the end's own.
    """

    def __init__(self, end: LocalEnd[Any]) -> None:
        self._end = end
        self._watch = end.watch()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._copy = -1  # the descriptor that is registered there
        self._turn: _Turn | None = None
        self._at_once = 0

    def __del__(self) -> None:
        if self._copy >= 0:
            os.close(self._copy)

    async def call(
        self, attempt: Callable[[], Result], timeout: float | None, *, is_news: bool
    ) -> Result:
        """What `attempt` returns, which has the timeout `NOW`, once it does not time out.

        Args:
            timeout: in seconds.
            is_news: whether a long wait is worth a line in the log.

        Raises:
            TimedOut: after `timeout`.
            ConcurrentUse: another coroutine awaits this end.
            MemlaneError: as `attempt`.
        """
        deadline = Deadline(timeout)
        self._end.check()
        if self._turn is not None and not self._turn.loop.is_closed():
            raise ConcurrentUse("another coroutine awaits this queue; one at a time may")
        stall = Stall(self._end.stall_line) if is_news else None
        turn = _Turn(asyncio.get_running_loop())
        self._turn = turn  # directly before `try`: a signal handler may raise at any call
        try:
            if self._watch.is_readable or deadline.has_passed():
                self._at_once += 1
                if self._at_once % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            else:
                await self._until_readable(turn, deadline, stall, counts=True)
            while True:
                if deadline.has_passed() or self._watch.is_readable:
                    try:
                        return attempt()
                    except TimedOut as error:
                        if error.timeout is not NOW:
                            raise
                    if deadline.has_passed():
                        raise self._end.timed_out(timeout)
                await self._until_readable(turn, deadline, stall)
        finally:
            if self._turn is turn:
                self._turn = None

    async def _until_readable(
        self, turn: _Turn, deadline: Deadline, stall: Stall | None, *, counts: bool = False
    ) -> None:
        """Or until the deadline, or until there is something to log."""
        loop = turn.loop
        if self._loop is not loop:
            self._register(loop)
        seconds = deadline.timeout_left()
        if stall is not None:
            stall.report()
            seconds = stall.due(inf if seconds is None else seconds)
        waiter = loop.create_future()
        timer = None if seconds is None else loop.call_later(seconds, _end, waiter)
        self._end.show_waiting(True, counts)
        turn.waiter = waiter
        try:
            await waiter
        finally:
            turn.waiter = None
            self._end.show_waiting(False, False)
            if timer is not None:
                timer.cancel()

    def _register(self, loop: asyncio.AbstractEventLoop) -> None:
        old, self._copy = self._copy, fcntl.fcntl(self._watch.fileno(), fcntl.F_DUPFD_CLOEXEC, 3)
        if old >= 0:
            if self._loop is not None and not self._loop.is_closed():
                self._loop.call_soon_threadsafe(_unregister, self._loop, old)
            else:
                os.close(old)
        loop.add_reader(self._copy, self._on_readable, loop, self._copy)
        self._loop = loop

    def _on_readable(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        turn = self._turn
        if turn is not None and turn.loop is loop and turn.waiter is not None:
            _end(turn.waiter)
        elif descriptor == self._copy:
            self._loop, self._copy = None, -1  # first: a signal handler may raise
            _unregister(loop, descriptor)


def _unregister(loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
    loop.remove_reader(descriptor)
    os.close(descriptor)


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
