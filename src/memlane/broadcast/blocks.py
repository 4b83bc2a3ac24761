"""Blocks on a chunk: what `acquire_write`, `acquire_read` and `dequeue_view` return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

from memlane._failures import view_in_use
from memlane._native import survivor
from memlane.errors import ViewInUse

if TYPE_CHECKING:
    import threading

    from memlane._native import RingReader, RingWriter, ViewLease

# `owner` is the queue: it must live as long as the block, or its end is freed under it.
#
# `view` is released and forgotten before the native end counts what still refers to the chunk: a
# view of which there is another view cannot be released, and a traceback would keep it.


@contextmanager
def write_block(owner: object, writer: RingWriter, timeout: float | None) -> Iterator[memoryview]:
    """Publishes the chunk unless the block raises, or leaves something that could change it."""
    view = writer.begin_write(timeout)
    is_whole = False
    try:
        yield view
        is_whole = True
    finally:
        _release(view)
        del view
        writer.end_write(publish=is_whole)
    del owner


@contextmanager
def read_block(
    owner: object, reader: RingReader, timeout: float | None, cancel: threading.Event | None
) -> Iterator[memoryview]:
    """Gives the chunk back, however the block ends; later if something still refers to it."""
    view = reader.begin_read(timeout, cancel)
    is_whole = False
    try:
        yield view
        is_whole = True
    finally:
        _release(view)
        del view
        # An error says more, and its traceback refers to what the block made.
        with nullcontext() if is_whole else suppress(ViewInUse):
            reader.end_read()
    del owner


class ViewBlock:
    """An object whose arrays are left where they lie; they keep its chunk or extent."""

    def __init__(
        self,
        owner: object,
        reader: RingReader,
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
            return  # an error says more, and its traceback refers to what the block made
        found = survivor(box, self._lease)
        box.clear()
        if found is not None and self._lease.is_held:
            raise view_in_use(found)


def _release(view: memoryview) -> None:
    with suppress(BufferError):
        view.release()
