"""The `with` block that `dequeue_view` returns: a message whose arrays stay in shared memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from memlane._base.diagnosis import view_in_use
from memlane._base.survivors import survivor

if TYPE_CHECKING:
    import threading

    from memlane._native import ViewLease


class ViewSource(Protocol):
    """A reader's end. It returns None in place of a lease if the object is a private copy."""

    def receive_view(
        self, timeout: float | None, cancel: threading.Event | None
    ) -> tuple[Any, ViewLease | None]: ...


class ViewBlock:
    """Receives an object whose arrays stay in shared memory, with a lease on its chunk or extent.

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
            return  # an error takes precedence, and its traceback refers to the block's objects
        found = survivor(box, self._lease)
        box.clear()
        if found is not None and self._lease.is_held:
            raise view_in_use(found)
