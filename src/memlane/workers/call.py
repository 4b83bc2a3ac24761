"""A call as its caller sees it: results, exceptions, waits for them. The group does the waiting."""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from memlane._base.deadline import Deadline
from memlane.errors import TimedOut
from memlane.workers.serving import add_note
from memlane.workers.table import Pending

if TYPE_CHECKING:
    from itertools import count

    from memlane.workers.answers import Answers
    from memlane.workers.callbacks import Callbacks

R = TypeVar("R")


class CallingGroup(Protocol):
    """The members of a group that its calls and streams use."""

    _answers: Answers
    _callbacks: Callbacks
    _keys: count[int]

    @property
    def pids(self) -> list[int]: ...
    def _cancel(self, pending: Pending, kill: bool) -> None: ...
    def _send(
        self, ranks: tuple[int, ...], seconds: float | None, name: str, message: list[Any]
    ) -> Call[Any]: ...
    async def _asend(
        self, ranks: tuple[int, ...], seconds: float | None, name: str, message: list[Any]
    ) -> Call[Any]: ...
    def _end_stream(self, key: int, ranks: tuple[int, ...]) -> None: ...


class Call(Generic[R]):
    """A call under way. Exceptions of workers are logged if nobody asks for its result.

    Attributes:
        name: of the method.
        ranks: the workers that run it.
    """

    def __init__(self, group: CallingGroup, pending: Pending, deadline: Deadline) -> None:
        self._group, self._receiver = group, group._answers
        self._pending, self._deadline = pending, deadline
        self.name, self.ranks = pending.name, pending.ranks
        pending.hand_out()

    def done(self) -> bool:
        """Returns whether `result` would not wait: all have answered, or one has raised or died.

        Takes the answers that have come. Raises nothing of the workers.
        """
        return self._receiver.wait(self._pending.is_settled, Deadline(0))

    def result(self, timeout: float | None = None) -> list[R]:
        """Returns the answers by rank. Raises as soon as one worker has raised or died, because
        others may wait for that one.

        Args:
            timeout: in seconds; None for those of `within`, else without limit.

        Raises:
            WorkerDied: a worker ended before it had answered.
            CallTimedOut: workers have not answered in time. It may be called again.
            Exception: what the first worker raised; its notes say which one, and where.
        """
        self._wait(self._pending.is_settled, timeout)
        values, error = self._settled()
        if error is None:
            return values
        try:
            raise error
        finally:
            del self, error  # else its traceback would refer to the call, and that to the error

    def __await__(self) -> Generator[Any, None, list[R]]:
        """Is `result` for asyncio, as often as you like. If it is cancelled, the workers go on."""
        waits = self._receiver.loops.wait(self._pending.is_settled, self._deadline)
        if not (yield from waits.__await__()):
            timed_out = partial(self._receiver.timed_out, self._pending, self._deadline.timeout)
            raise (yield from self._receiver.loops.beside(timed_out).__await__())
        values, error = self._settled()
        if error is None:
            return values
        try:
            raise error
        finally:
            del self, error  # as above

    def _settled(self) -> tuple[list[R], BaseException | None]:
        self._pending.ask()
        pending = self._pending
        if pending.errors:
            return [], self._error()
        return [pending.values[rank] for rank in self.ranks], None

    def outcomes(self, timeout: float | None = None) -> list[R | BaseException]:
        """Returns the answer or the exception of each worker, once all have answered or died.

        `timeout` is in seconds, as in `result`. Raises CallTimedOut as `result` does.
        """
        self._wait(self._pending.is_complete, timeout)
        self._pending.ask()
        found: dict[int, Any] = {**self._pending.values, **self._pending.errors}
        return [found[rank] for rank in self.ranks]

    def cancel(self, kill: bool = False) -> None:
        """Makes workers skip the call that have not begun it a millisecond later; `result` then
        raises Cancelled.

        Args:
            kill: workers that run it are replaced, as by `WorkerGroup.replace`.

        Raises:
            Closed: the group was closed.
            Exception: with `kill`, as `WorkerGroup.replace`.
        """
        self._group._cancel(self._pending, kill)

    def add_done_callback(self, callback: Callable[[Call[R]], object]) -> None:
        """Calls `callback(call)` once the call is done, as `done` has it: at once, or in a thread
        of the group. What it raises is logged."""
        self._group._callbacks.add(self._pending, partial(callback, self))

    def _wait(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        deadline = self._deadline if timeout is None else Deadline(timeout)
        if not self._receiver.wait(is_done, deadline):
            raise self._receiver.timed_out(self._pending, deadline.timeout)

    def _error(self) -> BaseException:
        first, *others = self._pending.errors.items()
        for rank, error in others:
            with suppress(Exception):  # its text may refuse to be read
                add_note(first[1], f"also raised by worker {rank}: {error!r}")
        return first[1]


def as_completed(calls: Iterable[Call[R]], timeout: float | None = None) -> Iterator[Call[R]]:
    """Yields calls, of one group or several, in the order in which they are done.

    `timeout` is in seconds, for all together. Raises TimedOut when it is over.
    """
    deadline = Deadline(timeout)
    done: queue.SimpleQueue[Call[R]] = queue.SimpleQueue()
    left = 0
    for call in calls:
        call.add_done_callback(done.put)
        left += 1
    for missing in range(left, 0, -1):
        try:
            yield done.get(timeout=deadline.timeout_left())
        except queue.Empty:
            raise TimedOut(
                f"timed out after {timeout} s; {missing} calls are not done", timeout
            ) from None
