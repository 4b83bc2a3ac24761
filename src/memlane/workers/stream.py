"""A stream as its caller sees it: each step is a call, sent one ahead of the step that is taken."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

from memlane.errors import Closed, MemlaneError, WorkerDied
from memlane.workers.ticket import NEXT, START

if TYPE_CHECKING:
    from memlane.workers.call import Call
    from memlane.workers.group import WorkerGroup

R = TypeVar("R")


class Stream(Generic[R]):
    """An iterator over what generators of workers yield: a list by rank for each step.

    It ends with the first generator that does, and with an exception of a worker or its death.
    That, `close()` and the last reference drop the generators, whose `finally` then runs. After
    `CallTimedOut` the same step may be asked for again.
    """

    _key: int | None = None

    def __init__(
        self,
        group: WorkerGroup[Any],
        ranks: tuple[int, ...],
        seconds: float | None,
        name: str,
        method: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._group, self._ranks, self._seconds, self._name = group, ranks, seconds, name
        self._died, self._pids = group._died(ranks), group.pids
        key = next(group._keys)
        first = group._send(ranks, seconds, name, [None, START, [key, method], args, kwargs])
        self._at: tuple[int, Call[list[R]] | None] = 1, first  # one store, between interrupts
        self._key = key

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> list[R]:
        if self._key is None:
            raise StopIteration
        number, step = self._at
        try:
            if step is None:
                step = self._ask(number)
                self._at = number, step
            answers = step.result()
        except (WorkerDied, Closed):
            self.close()
            raise
        except Exception:  # of a worker, or of a signal handler
            if step is not None and step._pending.errors:
                self.close()
            raise
        if not (answers and all(answers)):
            self.close()
            raise StopIteration
        try:
            following = self._ask(number + 1)
        except MemlaneError:  # the next step asks again, and raises it
            following = None
        self._at = number + 1, following
        return [item for (item,) in answers]

    def _ask(self, number: int) -> Call[list[R]]:
        message: list[Any] = [None, NEXT, [self._key, number], (), {}]
        step = self._group._send(self._ranks, self._seconds, self._name, message)
        now = self._group._died(self._ranks)
        for rank, before, died in zip(self._ranks, self._died, now, strict=True):
            if before != died:  # another process has the rank, and no generator
                step._pending.ask()
                raise WorkerDied(rank, self._pids[rank], None, f" in a stream of {self._name}()")
        return step

    def close(self) -> None:
        """Ends the workers' generators. Idempotent; waits for nothing."""
        key, self._key = self._key, None
        if key is not None:
            self._group._end_stream(key, self._ranks)

    __del__ = close
