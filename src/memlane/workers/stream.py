"""A stream as its caller sees it: each step is a call, sent one ahead of the step that is taken."""

from __future__ import annotations

from collections.abc import Generator
from types import coroutine
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from memlane.errors import Closed, MemlaneError, WorkerDied
from memlane.workers.ticket import NEXT, START

if TYPE_CHECKING:
    from memlane.workers.call import Call, CallingGroup

R = TypeVar("R")


class Stream(Generic[R]):
    """An iterator, also of asyncio, over what generators of workers yield: a list by rank for each
    step. They begin with the first step.

    It ends with the first generator that does, and with an exception of a worker or its death.
    That, `close()` and the last reference drop the generators, whose `finally` then runs. After
    `CallTimedOut` the same step may be asked for again.
    """

    _is_over = True  # until it is made

    def __init__(
        self,
        group: CallingGroup,
        ranks: tuple[int, ...],
        seconds: float | None,
        name: str,
        call: list[Any],
    ) -> None:
        self._group, self._to, self._call = group, (ranks, seconds, name), call
        self._died, self._pids = list[int](), list[int]()  # when it began
        self._key = next(group._keys)
        self._has_begun = self._is_over = False
        self._at: tuple[int, Call[list[R]] | None] = 1, None  # one store, between interrupts

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[R]:
        step = self._advance(awaits=False)
        while True:
            try:
                next(step)  # awaits nothing: that raises
            except StopIteration as done:
                if done.value is None:
                    raise
                items: list[R] = done.value
                return items

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[R]:
        items: list[R] | None = await self._advance(awaits=True)
        if items is None:
            raise StopAsyncIteration
        return items

    @coroutine
    def _advance(self, awaits: bool) -> Generator[Any, None, list[R] | None]:
        """Takes a step, and sends the one after the next. Returns None at the end."""
        if self._is_over:
            return None
        number, step = self._at
        try:
            if step is None:
                step = yield from self._ask(number, awaits)
                self._at = number, step
            answers = (yield from step.__await__()) if awaits else step.result()
        except (WorkerDied, Closed):
            self.close()
            raise
        except Exception:  # of a worker, or of a signal handler
            if step is not None and step._pending.errors:
                self.close()
            raise
        if not (answers and all(answers)):
            self.close()
            return None
        try:
            following = yield from self._ask(number + 1, awaits)
        except MemlaneError:  # the next step asks again, and raises it
            following = None
        self._at = number + 1, following
        return [item for (item,) in answers]

    def _ask(self, number: int, awaits: bool) -> Generator[Any, None, Call[list[R]]]:
        self._has_begun = True
        message: list[Any] = [None, NEXT, [self._key, number], (), {}]
        if number == 1:
            method, args, kwargs = self._call
            message = [None, START, [self._key, method], args, kwargs]
        if awaits:
            step = yield from self._group._asend(*self._to, message).__await__()
        else:
            step = self._group._send(*self._to, message)
        if number == 1:
            self._died, self._pids = step._pending.died, self._group.pids
        name = self._to[2]
        for rank in step.ranks:
            if self._died[rank] != step._pending.died[rank]:  # a new process has no generator
                step._pending.ask()
                raise WorkerDied(rank, self._pids[rank], None, f" in a stream of {name}()")
        return step

    def close(self) -> None:
        """Ends the workers' generators. Idempotent; waits for nothing."""
        if not self._is_over:
            self._is_over = True
            if self._has_begun:
                self._group._end_stream(self._key, self._to[0])

    __del__ = close
