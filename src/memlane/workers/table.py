"""The calls under way, by worker. Pure: knows nothing of processes, queues or the time.

Threads may share it. Each worker answers its calls in the order in which they were sent, so the
number of its answers shows which of them could not be decoded. Every step may be repeated: a signal
handler may have raised in the middle of it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from memlane._locks import Lock
from memlane.errors import Cancelled, Closed, WorkerDied

_log = logging.getLogger("memlane.workers")


class Unasked:
    """A worker's exception; logged when it is dropped, unless somebody has asked for it.

    An object of its own: calls without an exception have no `__del__` that Ctrl-C could interrupt,
    which would then be lost.
    """

    is_asked = False

    def __init__(self, name: str, rank: int, error: BaseException) -> None:
        self._name, self._rank, self._error = name, rank, error

    def __del__(self) -> None:
        if not self.is_asked and not isinstance(self._error, Cancelled | Closed):
            text = "nobody asked for the result of %s() of worker %d: %r"
            _log.error(text, self._name, self._rank, self._error)


class Pending:
    """A call that was sent to `ranks`, and what has become of it."""

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, tuple(ranks)
        self.missing = dict.fromkeys(self.ranks)  # that have not answered; ordered
        self.values: dict[int, Any] = {}
        self.errors: dict[int, BaseException] = {}  # in the order in which they came
        self.died: list[int] = []  # how often each worker had died when it was sent
        self.stored: dict[int, Any] | None = None  # of the group's store, until it is complete
        self._unasked: list[Unasked] | None = None

    def is_settled(self) -> bool:
        """Returns whether all have answered, or one of them has raised or died."""
        return bool(self.errors) or not self.missing

    def is_complete(self) -> bool:
        """Returns whether all have answered or died."""
        return not self.missing

    def take(self, rank: int, value: Any, error: BaseException | None) -> None:
        """Takes the first answer of a worker; others change nothing."""
        if rank not in self.missing:
            return
        if error is None:
            self.values[rank] = value
        else:
            self.errors[rank] = error
            if self._unasked is not None:
                self._unasked.append(Unasked(self.name, rank, error))
        del self.missing[rank]
        if not self.missing:
            self.stored = None

    def hand_out(self) -> None:
        """Notes that a caller has it, who can ask for exceptions."""
        self._unasked = [Unasked(self.name, *failed) for failed in [*self.errors.items()]]

    def ask(self) -> None:
        """Notes that its caller gets the exceptions."""
        for error in self._unasked or ():
            error.is_asked = True
        self._unasked = None


class Table:
    """The numbers of calls, and the calls that each worker has not answered."""

    def __init__(self, world: int, most: int) -> None:
        self._most = most
        self._due: list[deque[tuple[int, Pending]]] = [deque() for _ in range(world)]
        self._taking = Lock()  # of the thread that takes answers, or fails calls
        self._sent = [0] * world
        self.deaths: dict[int, WorkerDied] = {}  # of workers that were not replaced
        self.died = [0] * world  # times

    def start(self, rank: int) -> Pending:
        """Begins with a new process of that rank; returns the call that its start answers."""
        start = Pending("start", [rank])
        self._sent[rank] = 0
        self._due[rank] = deque([(0, start)])
        self.deaths.pop(rank, None)
        return start

    def begin(self, call: Pending, ranks: Sequence[int]) -> list[int] | int:
        """Adds a call to what these owe, before it is sent; returns its number, or the last numbers
        by rank if those of its workers differ."""
        sent, due, number = self._sent, self._due, 0
        for rank in ranks:
            number = sent[rank] + 1
            due[rank].append((number, call))
            sent[rank] = number
        return number if len(ranks) == 1 or sent.count(number) == len(sent) else [*sent]

    def take_back(self, call: Pending, ranks: Iterable[int]) -> None:
        """Removes the call that was added last, even if in part: it was not sent. It may be sent
        again, to another process of a rank whose death it was told meanwhile."""
        for rank in ranks:
            due = self._due[rank]
            with self._taking:
                if call.errors.pop(rank, None) is not None:
                    call.missing[rank] = None
                if due and due[-1][1] is call:
                    self._sent[rank] = due[-1][0] - 1
                    due.pop()

    def answer(self, rank: int, number: int, value: Any, error: BaseException | None) -> None:
        """Takes an answer."""
        due = self._due[rank]
        with self._taking:
            if due:
                expected, call = due[0]
                if expected == number:
                    call.take(rank, value, error)
                    due.popleft()

    def lose(self, rank: int, number: int, error: BaseException) -> bool:
        """Fails what is owed of the calls before that number; returns whether there were any."""
        due = self._due[rank]
        has_any = False
        with self._taking:
            while due and due[0][0] < number:
                due[0][1].take(rank, None, error)
                due.popleft()
                has_any = True
        return has_any

    def die(self, rank: int, death: WorkerDied) -> None:
        """Fails what the worker owes."""
        self.deaths[rank] = death  # before the count: a call with the new count fails
        self.died[rank] += 1
        self.fail(rank, death)

    def fail(self, rank: int, error: BaseException) -> None:
        """Fails what the worker owes."""
        due = self._due[rank]
        with self._taking:
            while due:
                due[0][1].take(rank, None, error)
                due.popleft()

    def full(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of the workers that have to answer too many calls for another one."""
        if max(map(len, self._due)) < self._most:
            return []
        return [rank for rank in ranks if len(self._due[rank]) >= self._most]

    def owing(self, stored: object) -> Pending | None:
        """Returns a call that has that object of the store; None if there is none."""
        for due in [*self._due]:
            for _, call in [*due]:
                if call.stored is not None and id(stored) in call.stored:
                    return call
        return None

    def numbers(self, call: Pending) -> dict[int, int]:
        """Returns the call's numbers, by the ranks that have not answered it."""
        return {
            rank: number
            for rank in [*call.missing]
            for number, owed in [*self._due[rank]]
            if owed is call
        }

    def answered(self, rank: int) -> int:
        """Returns the number of the call that the worker has answered last."""
        due = self._next(rank)
        return due[0] - 1 if due else self._sent[rank]

    def is_running(self, rank: int, call: Pending) -> bool:
        """Returns whether the worker answers that call next."""
        due = self._next(rank)
        return due is not None and due[1] is call

    def running(self, rank: int) -> str | None:
        """Returns the name of the call that the worker answers next."""
        due = self._next(rank)
        return due[1].name if due else None

    def _next(self, rank: int) -> tuple[int, Pending] | None:
        with self._taking:
            due = self._due[rank]
            return due[0] if due else None

    def state(self, rank: int) -> str:
        """Returns what the worker, which has died, may have run, for its error."""
        due = [*self._due[rank]]
        if not due:
            return ""
        if due[0][0] == 0:
            return " before it was ready; its output on stderr may say why"
        if len(due) == 1:
            ran = "it has run it once, in part, or not at all"
            return f" before it answered {due[0][1].name}(): {ran}"
        ran = "it has run each once, in part, or not at all"
        return f" before it answered {due[0][1].name}() and {len(due) - 1} more: {ran}"

    @property
    def is_idle(self) -> bool:
        """No worker owes an answer."""
        return not any(self._due)
