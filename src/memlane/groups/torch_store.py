"""The store of a torch.distributed group. Imported only once the caller has imported torch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist

from memlane import _threads
from memlane._undo import undone_by
from memlane.errors import GroupFailed, RankMissing, Unsupported
from memlane.groups.collectives import Deadline


def is_process_group(group: object) -> bool:
    """Whatever its backend: only its store is used."""
    return dist.is_available() and isinstance(group, dist.ProcessGroup)


def is_torch_store(store: object) -> bool:
    """Of a group that is not torch's own, but keeps a store of torch's."""
    return dist.is_available() and isinstance(store, dist.Store)


def store_of(group: Any) -> Any:
    """The store by which the ranks of this very group have found each other."""
    try:
        if hasattr(group, "get_group_store"):
            return group.get_group_store()
        return dist.distributed_c10d._get_process_group_store(group)  # before torch 2.6
    except (RuntimeError, KeyError) as error:
        raise Unsupported(f"this process group has no store to meet in: {error}") from None


class TorchStore:
    """A torch store for one collective call.

    An operation of torch's cannot be given up, and lasts for as long as the process that keeps the
    store is stopped. So they run in a thread, by a connection of their own, because others of the
    group must not wait with it; and waits for a key in another one, because they lock theirs. A
    wait that is given up prints warnings, so it goes on to its end, which comes when something is
    put there.

    Raises:
        RankMissing: the store has not answered by the deadline.
        GroupFailed: it is gone.
    """

    def __init__(self, store: Any, deadline: Deadline) -> None:
        self._deadline = deadline
        self._has_answered = False
        self._operations = _Line()
        self._waits: _Line | None = None
        self._wait: tuple[str, _Answer] | None = None
        with undone_by(self._operations.end):
            # If it is gone, this says so; a new connection tries long.
            self._ask(lambda: store.check(["memlane"]))
            self._store = self._ask(lambda: _clone(store))

    def add(self, key: str, number: int) -> int:
        return int(self._ask(lambda: self._store.add(key, number)))

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str, timeout: float) -> bytes | None:
        if not self.has(key):
            if timeout <= 0:
                return None
            if self._wait is None:
                self._wait = key, self._begin_wait(key)
            if _ended(self._wait[1], timeout) is None:
                return None
            self._wait = None
        elif self._wait is not None and self._wait[0] == key:
            self._ask_for(self._wait[1])
            self._wait = None
        return bytes(self._ask(lambda: self._store.get(key)))

    def has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def delete(self, key: str) -> None:
        self._ask(lambda: self._store.delete_key(key))

    def close(self, over: bytes) -> None:
        try:
            if self._wait is not None:
                key, answer = self._wait
                self.set(key, over)
                self._ask_for(answer)
        finally:
            for line in (self._operations, self._waits):
                if line is not None:
                    line.end()
            del self._store

    def _ask(self, operation: Callable[[], Any]) -> Any:
        return self._ask_for(self._operations.begin(operation))

    def _ask_for(self, answer: _Answer) -> Any:
        left = self._deadline.left(_LONGEST)
        if self._has_answered:
            # What works answers at once, behind the deadline, too: it then names the missing.
            left = max(left, _GRACE)
        ended = _ended(answer, left)
        if ended is None:
            raise RankMissing(
                f"gave up after {self._deadline.timeout} s waiting for the store of the process "
                f"group: the process that keeps it (rank 0's, most often) is stopped, busy or out "
                f"of reach",
                self._deadline.timeout,
            )
        self._has_answered = True
        return ended[0]

    def _begin_wait(self, key: str) -> _Answer:
        if self._waits is None:
            self._waits = _Line()
        timeout = timedelta(seconds=self._deadline.left(_LONGEST) + _BEYOND)
        return self._waits.begin(lambda: _clone(self._store).wait([key], timeout))


_LONGEST = 3.0e6
_GRACE = 3.0  # seconds; nothing but threads of torch's has to come to it, also where much else runs
# So much longer than a call its waits may last; by then they were ended.
_BEYOND = 60.0

_Answer = SimpleQueue[tuple[Any, Exception | None]]
"""Of an operation: its value, or its error, once it has ended."""


class _Line:
    """A thread that calls the store, one operation after another. One that never ends keeps its
    thread, and nobody else."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        self._pending = 0
        self._thread = Thread(target=self._run, name="memlane-store", daemon=True)
        _threads.start(self._thread)

    def begin(self, call: Callable[[], Any]) -> _Answer:
        answer: _Answer = SimpleQueue()
        self._pending += 1
        self._calls.put((call, answer))
        return answer

    def end(self) -> None:
        """Behind what was begun; waits for the thread if nothing is."""
        self._calls.put(None)
        if self._pending == 0:
            self._thread.join()

    def _run(self) -> None:
        while (asked := self._calls.get()) is not None:
            call, answer = asked
            outcome: tuple[Any, Exception | None]
            try:
                outcome = call(), None
            except Exception as error:
                outcome = None, error
            del asked, call
            self._pending -= 1
            answer.put(outcome)


def _ended(answer: _Answer, timeout: float) -> tuple[Any] | None:
    """The value of an operation that ends within that time."""
    try:
        value, error = answer.get(timeout=timeout)
    except Empty:
        return None
    if isinstance(error, RuntimeError):
        text = f"the store of the process group does not answer: {error}"
        raise GroupFailed(text) from error
    if error is not None:
        raise error
    return (value,)


def _clone(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store  # torch 2.8
