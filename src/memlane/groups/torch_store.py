"""The store of a torch.distributed group. Imported only once the caller has imported torch."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist

from memlane._base.deadline import Deadline
from memlane._base.lifetime import start_thread, undone_by
from memlane.errors import GroupFailed, RankMissing, Unsupported


def is_process_group(group: object) -> bool:
    """True for any backend, because only the group's store is used."""
    return dist.is_available() and isinstance(group, dist.ProcessGroup)


def is_torch_store(store: object) -> bool:
    """Whether it is one: groups that are not torch's own may have one, too."""
    return dist.is_available() and isinstance(store, dist.Store)


def store_of(group: Any) -> Any:
    """The store through which the ranks of this very group found each other."""
    try:
        if hasattr(group, "get_group_store"):
            return group.get_group_store()
        return dist.distributed_c10d._get_process_group_store(group)  # before torch 2.6
    except (RuntimeError, KeyError) as error:
        raise Unsupported(f"this process group has no store: {error}") from None


def host_of(store: Any) -> str | None:
    """Returns the host of a TCPStore; None of another kind."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    host = getattr(store, "host", None)
    return host if isinstance(host, str) else None


class TorchStore:
    """A torch store for one collective call.

    A torch operation cannot be cancelled, and blocks while the process that hosts the store is
    stopped. So operations run in a thread, over their own connection, so that other users of the
    group's store are not blocked with them. Waits for a key lock their connection, so they have
    another thread and connection. A wait that times out prints warnings, so an abandoned wait
    continues until its key is set.

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
            # Fails at once if the store is gone; a new connection would retry for long.
            self._ask(lambda: store.check(["memlane"]))
            self._store = self._ask(lambda: _clone(store))

    def add(self, key: str, number: int) -> int:
        return int(self._ask(lambda: self._store.add(key, number)))

    def set(self, key: str, value: bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str, timeout: float) -> bytes | None:
        """Returns None after `_SLICE`, too, because `wake` cannot end a wait."""
        if not self.has(key):
            if timeout <= 0:
                return None
            if self._wait is None:
                self._wait = key, self._begin_wait(key)
            if _ended(self._wait[1], min(timeout, _SLICE)) is None:
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

    def wake(self) -> None:
        """Does nothing, as no wait here can be ended: it looks again after a slice."""

    def join(self, call: int) -> None:
        """The store keeps nothing about connections."""

    def dead(self) -> list[int]:
        """None: the store does not show the connections of the others."""
        return []

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
            # A working store answers at once, even after the deadline, to name the missing ranks.
            left = max(left, _GRACE)
        ended = _ended(answer, left)
        if ended is None:
            raise RankMissing(
                f"timed out after {self._deadline.timeout} s waiting for the store of the process "
                f"group: the process that keeps it (usually rank 0's) is stopped, busy or "
                f"unreachable",
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
_SLICE = 0.2  # seconds after which a rank that waits looks who has died or left
_GRACE = 3.0  # seconds; enough for torch's threads to be scheduled even on a busy machine
# Seconds that a wait may outlast its call; `close` ends it before that.
_BEYOND = 60.0

_Answer = SimpleQueue[tuple[Any, Exception | None]]
"""Receives the value of an operation, or its error, once it has ended."""


class _Line:
    """A thread that runs store operations one after another. An operation that never ends blocks
    only this thread."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], _Answer] | None] = SimpleQueue()
        self._pending = 0
        self._thread = Thread(target=self._run, name="memlane-store", daemon=True)
        start_thread(self._thread)

    def begin(self, call: Callable[[], Any]) -> _Answer:
        answer: _Answer = SimpleQueue()
        self._pending += 1
        self._calls.put((call, answer))
        return answer

    def end(self) -> None:
        """Ends the thread after what was begun; waits for it if nothing is pending."""
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
    """The value of an operation, as a tuple; None if it does not end in time."""
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
    return store.clone() if hasattr(store, "clone") else store  # since torch 2.8
