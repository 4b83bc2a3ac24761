"""The store of a torch.distributed group. Imported only once the caller has imported torch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from memlane.errors import GroupFailed, Unsupported
from memlane.groups.collectives import Deadline


def is_process_group(group: object) -> bool:
    """Whatever its backend: only its store is used."""
    return isinstance(group, dist.ProcessGroup)


def is_torch_store(store: object) -> bool:
    """Of a group that is not torch's own, but keeps a store of torch's."""
    return isinstance(store, dist.Store)


def store_of(group: Any) -> Any:
    """The store by which the ranks of this very group have found each other."""
    try:
        if hasattr(group, "get_group_store"):
            return group.get_group_store()
        return dist.distributed_c10d._get_process_group_store(group)  # before torch 2.6
    except (RuntimeError, KeyError) as error:
        raise Unsupported(f"this process group has no store to meet in: {error}") from None


class TorchStore:
    """A torch store for one collective call."""

    def __init__(self, store: Any, deadline: Deadline) -> None:
        # A wait locks the store's connection; who else uses the group must not wait with it.
        with _told():
            self._store = store.clone() if hasattr(store, "clone") else store
        self._deadline = deadline

    def add(self, key: str, number: int) -> int:
        with _told():
            return int(self._store.add(key, number))

    def set(self, key: str, value: bytes) -> None:
        with _told():
            self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes | None:
        with _told():
            if timeout <= 0 and not self._store.check([key]):
                return None
            end = time.monotonic() + timeout
            try:
                self._store.wait([key], timedelta(seconds=max(timeout, 0.001)))
            except RuntimeError:  # not all stores have a class of its own for a timeout
                if time.monotonic() < end:
                    raise
                return None
            return bytes(self._store.get(key))

    def has(self, key: str) -> bool:
        with _told():
            return bool(self._store.check([key]))

    def delete(self, key: str) -> None:
        with _told():
            self._store.delete_key(key)

    def close(self) -> None:
        del self._store


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise GroupFailed(f"the store of the process group does not answer: {error}") from error
