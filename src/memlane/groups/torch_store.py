"""The store of a torch.distributed group. Imported only once the caller has imported torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist

from memlane import _threads
from memlane.errors import GroupFailed, Unsupported
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

    Connections of its own, because a wait locks one, and other users of the group must not wait
    with it. A wait that is given up prints warnings, so it runs in a thread, to its end, which
    comes when something is put there.
    """

    def __init__(self, store: Any, deadline: Deadline) -> None:
        with _told():
            store.check(["memlane"])  # if it is gone, this says so; a new connection tries long
            self._store = _clone(store)
        self._deadline = deadline
        self._wait: _Wait | None = None

    def add(self, key: str, number: int) -> int:
        with _told():
            return int(self._store.add(key, number))

    def set(self, key: str, value: bytes) -> None:
        with _told():
            self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        with _told():
            if not self._store.check([key]):
                if timeout <= 0:
                    return None
                if self._wait is None:
                    self._wait = _Wait(_clone(self._store), key, self._deadline.left(_LONGEST))
                if not self._wait.is_over(timeout):
                    return None
            if self._wait is not None and self._wait.key == key:
                self._wait.end()
                self._wait = None
            return bytes(self._store.get(key))

    def has(self, key: str) -> bool:
        with _told():
            return bool(self._store.check([key]))

    def delete(self, key: str) -> None:
        with _told():
            self._store.delete_key(key)

    def close(self, over: bytes) -> None:
        if self._wait is not None:
            with _told():
                self._store.set(self._wait.key, over)
                self._wait.end()
        del self._store


_LONGEST = 3.0e6
# So much longer than a call its waits may last; by then they were ended.
_BEYOND = 60.0


class _Wait:
    """Waits for one key in a thread; one at a time."""

    def __init__(self, store: Any, key: str, longest: float) -> None:
        self.key = key
        self._over: SimpleQueue[RuntimeError | None] = SimpleQueue()
        timeout = timedelta(seconds=longest + _BEYOND)
        self._thread = Thread(
            target=self._run, args=(store, timeout), name="memlane-store", daemon=True
        )
        _threads.start(self._thread)

    def _run(self, store: Any, timeout: timedelta) -> None:
        try:
            store.wait([self.key], timeout)
        except RuntimeError as error:
            self._over.put(error)
        else:
            self._over.put(None)

    def is_over(self, timeout: float) -> bool:
        """Whether the key is there within that time."""
        try:
            error = self._over.get(timeout=timeout)
        except Empty:
            return False
        if error is not None:
            raise error
        return True

    def end(self) -> None:
        """The key is there."""
        self._thread.join()


def _clone(store: Any) -> Any:
    return store.clone() if hasattr(store, "clone") else store  # torch 2.8


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupFailed(f"the store of the process group does not answer: {error}") from error
