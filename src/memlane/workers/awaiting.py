"""Awaits answers in event loops of asyncio's, by the descriptor of the gather: no thread, no
polling. Only what may take long otherwise, replacing workers, is left to a thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from memlane import Gather
from memlane._base.deadline import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memlane.workers.table import Pending

    Waits = tuple[Callable[[], bool], list[int]] | None


T = TypeVar("T")


class Receiving(Protocol):
    """The way back from the workers."""

    followers: list[Any]
    is_closed: bool

    def wait(self, is_done: Callable[[], bool], deadline: Deadline) -> bool: ...


class Sending(Protocol):
    """The way to the workers."""

    needs_heal: Callable[[], bool]

    def attempt(self, pending: Pending, message: list[Any], deadline: Deadline) -> Waits: ...
    def attempt_at_once(self, pending: Pending, message: list[Any]) -> tuple[bool, Waits]: ...
    def must_be_in_time(
        self, has_room: bool, pending: Pending, full: list[int], deadline: Deadline
    ) -> None: ...
    def heal_now(self, ranks: Iterable[int]) -> None: ...


class _Waiter:
    """A coroutine that waits, among the threads that follow the one that receives."""

    def __init__(self, loop: asyncio.AbstractEventLoop, is_done: Callable[[], bool]) -> None:
        self._loop, self._is_done = loop, is_done
        self._thread = threading.get_ident()
        self.woken = asyncio.Event()

    def release(self) -> None:
        """Is called after each answer, as a lock's, in any thread."""
        if self._is_done():
            self.wake()

    def wake(self) -> None:
        if threading.get_ident() == self._thread:
            self.woken.set()
        else:
            self._loop.call_soon_threadsafe(self.woken.set)


class Loops:
    """The event loops in which coroutines wait. The first of each takes what has come, for all."""

    def __init__(self, answers: Receiving, gather: Gather[Any]) -> None:
        self._answers, self._gather = answers, gather
        self._waiters: dict[asyncio.AbstractEventLoop, list[_Waiter]] = {}

    async def wait(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """As `Answers.wait`. Cancelling it changes nothing."""
        if self._answers.wait(is_done, Deadline(0)) or deadline.has_passed():
            return is_done()
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop, lambda: is_done() or self._answers.is_closed)
        seconds = deadline.timeout_left()
        timer = None if seconds is None else loop.call_later(seconds, waiter.wake)
        self._enter(loop, waiter)
        try:
            while not (self._answers.wait(is_done, Deadline(0)) or self._answers.is_closed):
                if deadline.has_passed():
                    break
                await waiter.woken.wait()
                waiter.woken.clear()
            return is_done()
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(loop, waiter)

    def _enter(self, loop: asyncio.AbstractEventLoop, waiter: _Waiter) -> None:
        waiters = self._waiters.setdefault(loop, [])
        if not waiters:
            loop.add_reader(self._gather.fileno(), lambda: waiters[0].wake())
        waiters.append(waiter)
        self._answers.followers.append(waiter)

    def _leave(self, loop: asyncio.AbstractEventLoop, waiter: _Waiter) -> None:
        self._answers.followers.remove(waiter)
        waiters = self._waiters[loop]
        waiters.remove(waiter)
        if not waiters:
            loop.remove_reader(self._gather.fileno())
            del self._waiters[loop]

    async def beside(self, call: Callable[[], T]) -> T:
        """Returns what a call returns that may take long."""
        return await asyncio.to_thread(call)

    async def submit(
        self, sender: Sending, pending: Pending, message: list[Any], deadline: Deadline
    ) -> None:
        """As `Sender.submit`. If it is cancelled, no worker gets the call, unless there was no
        space in the queue."""
        while True:
            is_free, waits = False, None
            if not sender.needs_heal():
                is_free, waits = sender.attempt_at_once(pending, message)
            if not is_free:
                await asyncio.to_thread(sender.heal_now, pending.ranks)
                continue
            if waits is None:
                return
            may_send, full = waits
            if not full and may_send():  # the queue has no space: a thread waits for that
                waits = await asyncio.to_thread(sender.attempt, pending, message, deadline)
                if waits is None:
                    return
                may_send, full = waits
            sender.must_be_in_time(await self.wait(may_send, deadline), pending, full, deadline)
