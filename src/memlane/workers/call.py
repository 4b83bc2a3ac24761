"""A call as its caller sees it: results, exceptions, waits for them. The group does the waiting."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from memlane._base.deadline import Deadline
from memlane.errors import CallTimedOut
from memlane.workers.table import Pending

if TYPE_CHECKING:
    from memlane.workers.awaiting import Loops

R = TypeVar("R")


class Receiver(Protocol):
    """What calls use of a group."""

    @property
    def loops(self) -> Loops:
        """The event loops that wait for answers."""

    def wait(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """Receives answers until `is_done`; returns False at the deadline."""

    def timed_out(self, call: Pending, timeout: float | None) -> CallTimedOut:
        """The error of a call that some workers have not answered in time."""


class Call(Generic[R]):
    """A call under way. Exceptions of workers are logged if nobody asks for its result.

    Attributes:
        name: of the method.
        ranks: the workers that run it.
    """

    def __init__(self, receiver: Receiver, pending: Pending, deadline: Deadline) -> None:
        self._receiver, self._pending, self._deadline = receiver, pending, deadline
        self.name, self.ranks = pending.name, pending.ranks
        pending.hand_out()

    def done(self) -> bool:
        """Returns whether `result` would not wait: all have answered, or one has raised or died.

        Takes the answers that have come. Raises nothing of the workers.
        """
        return self._receiver.wait(lambda: self._pending.is_settled, Deadline(0))

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
        self._wait(lambda: self._pending.is_settled, timeout)
        return self._results()

    def __await__(self) -> Generator[Any, None, list[R]]:
        """Is `result` for asyncio, as often as you like. If it is cancelled, the workers go on."""
        waits = self._receiver.loops.wait(lambda: self._pending.is_settled, self._deadline)
        if not (yield from waits.__await__()):
            raise self._receiver.timed_out(self._pending, self._deadline.timeout)
        return self._results()

    def _results(self) -> list[R]:
        self._pending.ask()
        pending = self._pending
        if pending.errors:
            raise self._error()
        return [pending.values[rank] for rank in self.ranks]

    def outcomes(self, timeout: float | None = None) -> list[R | BaseException]:
        """Returns the answer or the exception of each worker, once all have answered or died.

        `timeout` is in seconds, as in `result`. Raises CallTimedOut as `result` does.
        """
        self._wait(lambda: self._pending.is_complete, timeout)
        self._pending.ask()
        found: dict[int, Any] = {**self._pending.values, **self._pending.errors}
        return [found[rank] for rank in self.ranks]

    def _wait(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        deadline = self._deadline if timeout is None else Deadline(timeout)
        if not self._receiver.wait(is_done, deadline):
            raise self._receiver.timed_out(self._pending, deadline.timeout)

    def _error(self) -> BaseException:
        first, *others = self._pending.errors.items()
        for rank, error in others:
            note = f"also raised by worker {rank}: {error!r}"
            if note not in getattr(first[1], "__notes__", ()):
                first[1].add_note(note)
        return first[1]
