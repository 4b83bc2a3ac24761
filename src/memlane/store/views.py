"""An object whose arrays are left where they lie: what `view` returns."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from memlane._failures import view_in_use
from memlane._native import survivor
from memlane.errors import InvalidType, Unsupported

if TYPE_CHECKING:
    from memlane._native import PinnedObject
    from memlane.store.reading import ObjectReads


class ObjectView:
    """A block on an object; it is kept from eviction until the last alias of its bytes goes.

    `storage` must live as long as the block, or its end is freed under it.
    """

    __slots__ = ("_events", "_pinned", "_place", "_storage", "_value")

    def __init__(self, storage: ObjectReads, address: int, number: int) -> None:
        self._storage = storage
        self._place = (address, number)
        self._pinned: PinnedObject | None = None
        self._events: list[Any] = []

    def __enter__(self) -> Any:
        pinned = self._storage._pin(*self._place)
        self._value = self._storage._decoded_view(pinned)
        self._pinned = pinned
        return self._value

    def release_after(self, stream_or_event: Any) -> None:
        """Has the end of the block wait for work that a GPU does on the object.

        Args:
            stream_or_event: a `torch.cuda.Stream`, for all that is on it now, or a recorded
                `torch.cuda.Event`.
        """
        torch: Any = sys.modules.get("torch")  # who has a stream or an event has imported it
        if not hasattr(torch, "cuda"):
            raise Unsupported(
                "release_after is for work that torch does on a GPU, and this process has not "
                "imported torch"
            )
        if not torch.cuda.is_available():
            raise Unsupported("release_after is for work on a GPU; torch finds none here")
        if isinstance(stream_or_event, torch.cuda.Stream):
            stream_or_event = stream_or_event.record_event()
        if not isinstance(stream_or_event, torch.cuda.Event):
            raise InvalidType(
                f"a torch.cuda.Stream or Event is needed, not {type(stream_or_event).__name__}"
            )
        self._events.append(stream_or_event)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is None:
            return
        box, self._value = [self._value], None
        lease = pinned.lease()
        try:
            for event in self._events:
                event.synchronize()
            if not self._storage.is_closed:
                self._storage._finish(pinned)
        finally:
            pinned.release()
        if kind is not None:
            return  # an error says more, and its traceback refers to what the block made
        found = survivor(box, lease)
        box.clear()
        if found is not None and lease.is_held:
            raise view_in_use(found)
