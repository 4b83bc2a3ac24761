"""Collective calls through a group that offers only `broadcast_obj`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

from memlane._base.deadline import Deadline
from memlane._base.lifetime import start_thread
from memlane.errors import GroupFailed, RankMissing
from memlane.groups.collectives import (
    Collectives,
    Outcome,
    missing_error,
)


class BroadcastGroup(Protocol):
    """Any object with these attributes counts as a group."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    def broadcast_obj(self, obj: Any, src: int) -> Any:
        """Returns the object of rank `src` on all ranks; the others' argument is None."""


class BroadcastCollectives(Collectives):
    """One collective call made of broadcasts; a gather is one broadcast from each rank in turn.

    A foreign `broadcast_obj` has no deadline, so it runs in a thread unless it takes a `timeout`.
    If the deadline passes first, the thread stays in the broadcast until the group ends it, and
    the group is out of step: make a new one.
    """

    def __init__(self, group: BroadcastGroup, rank: int, size: int, deadline: Deadline) -> None:
        super().__init__(rank, size, deadline)
        self._group = group
        try:
            self._takes_timeout = "timeout" in inspect.signature(group.broadcast_obj).parameters
        except (TypeError, ValueError):  # not written in Python
            self._takes_timeout = False

    def _broadcast(self, src: int, outcome: Outcome | None) -> Outcome:
        value: Outcome = self._call(src, outcome)
        return value

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """The other ranks cannot be told; they have their deadlines."""

    def _gather(self, outcome: Outcome) -> list[Outcome]:
        return [self._call(src, outcome if src == self.rank else None) for src in range(self.size)]

    def _scatter(self, src: int, outcomes: Sequence[Outcome] | None) -> Outcome:
        items = self._call(src, None if outcomes is None else list(outcomes))
        if not isinstance(items, list) or len(items) != self.size:
            return {}
        item: Outcome = items[self.rank]
        return item

    def _call(self, src: int, obj: Any) -> Any:
        try:
            return self._within_deadline(src, obj)
        except RankMissing:
            raise
        except TimeoutError as error:
            raise missing_error(self.size, [src], self.deadline.timeout) from error
        except Exception as error:
            raise GroupFailed(
                f"broadcasting from rank {src} of the group failed: {error!r}", src
            ) from error

    def _within_deadline(self, src: int, obj: Any) -> Any:
        left = self.deadline.timeout_left()
        if self._takes_timeout:
            return self._group.broadcast_obj(obj, src, timeout=left)  # type: ignore[call-arg]
        if left is None:
            return self._group.broadcast_obj(obj, src)
        ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

        def run() -> None:
            try:
                ended.put((self._group.broadcast_obj(obj, src), None))
            except BaseException as error:
                ended.put((None, error))

        thread = Thread(target=run, name="memlane-broadcast", daemon=True)
        start_thread(thread)
        try:
            value, error = ended.get(timeout=left)
        except Empty:
            missing = [src] if src != self.rank else [r for r in range(self.size) if r != src]
            raise missing_error(self.size, missing, self.deadline.timeout) from None
        thread.join()
        if error is not None:
            raise error
        return value
