"""A block on a message whose arrays stay in shared memory, as `dequeue_view` returns it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from memlane._failures import view_in_use
from memlane._survivors import survivor

if TYPE_CHECKING:
    import threading

    from memlane._native import ViewLease


class ViewSource(Protocol):
    """A reader's end. If it returns no lease, the object is a copy of the reader's own."""

    def receive_view(
        self, timeout: float | None, cancel: threading.Event | None
    ) -> tuple[Any, ViewLease | None]: ...


class ViewBlock:
    """An object whose arrays stay in shared memory, and keep its chunk or extent.

    `owner` is the queue, kept alive so that its end is not freed during the block.
    """

    def __init__(
        self,
        owner: object,
        reader: ViewSource,
        timeout: float | None,
        cancel: threading.Event | None,
    ) -> None:
        self._owner = owner
        self._reader = reader
        self._wait = (timeout, cancel)
        self._value: Any = None
        self._lease: ViewLease | None = None

    def __enter__(self) -> Any:
        self._value, self._lease = self._reader.receive_view(*self._wait)
        return self._value

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        box, self._value = [self._value], None
        if kind is not None or self._lease is None:
            return  # the error matters more, and its traceback refers to objects of the block
        found = survivor(box, self._lease)
        box.clear()
        if found is not None and self._lease.is_held:
            raise view_in_use(found)
