"""Awaits an end in an event loop of asyncio's, by its descriptor: no executor, no polling."""

from __future__ import annotations

import asyncio
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from memlane._base.deadline import Deadline
from memlane._base.diagnosis import Stall
from memlane.errors import ConcurrentUse, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane.broadcast.local import LocalEnd

Result = TypeVar("Result")


class Awaiting:
    """Awaits calls of one end. A coroutine that is cancelled has called nothing.

    The loop that waited last keeps the descriptor registered, so that a message costs it no further
    system call, until it is readable and nobody waits.
    """

    def __init__(self, end: LocalEnd[Any]) -> None:
        self._end = end
        self._watch = end.watch()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._is_awaited = False

    async def call(
        self, attempt: Callable[[], Result], timeout: float | None, *, is_news: bool
    ) -> Result:
        """What `attempt` returns, which does not wait, once it does not raise TimedOut.

        Args:
            timeout: in seconds.
            is_news: whether a long wait is worth a line in the log.

        Raises:
            TimedOut: after `timeout`.
            ConcurrentUse: another coroutine awaits this end.
            MemlaneError: as `attempt`.
        """
        deadline = Deadline(timeout)
        if self._is_awaited:
            raise ConcurrentUse("another coroutine awaits this queue; one at a time may")
        self._is_awaited = True
        stall = Stall(self._end.stall_line) if is_news else None
        try:
            if not self._watch.is_readable and not deadline.has_passed():
                await self._until_readable(deadline, stall)
            while True:
                try:
                    return attempt()
                except TimedOut:
                    if deadline.has_passed():
                        raise self._end.timed_out(timeout) from None
                await self._until_readable(deadline, stall)
        finally:
            self._is_awaited = False

    async def _until_readable(self, deadline: Deadline, stall: Stall | None) -> None:
        """Or until the deadline, or until there is something to log."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            loop.add_reader(self._watch.fileno(), self._on_readable, loop)
            self._loop = loop
        waiter = self._waiter = loop.create_future()
        seconds = inf if deadline.end == inf else deadline.left()
        if stall is not None:
            stall.report()
            seconds = stall.due(seconds)
        timer = None if seconds == inf else loop.call_later(seconds, _end, waiter)
        self._end.show_waiting(True)
        try:
            await waiter
        finally:
            self._waiter = None
            self._end.show_waiting(False)
            if timer is not None:
                timer.cancel()

    def _on_readable(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiter is not None and self._loop is loop:
            _end(self._waiter)
            return
        loop.remove_reader(self._watch.fileno())
        if self._loop is loop:
            self._loop = None


def _end(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
