"""Chunks filled and read by hand: what `acquire_write` and `acquire_read` return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from memlane.errors import ViewInUse

if TYPE_CHECKING:
    import threading

    from memlane._native import RingReader, RingWriter

# `owner` is the queue: it must live as long as the block, or its end is freed under it.
#
# `view` is released and forgotten before the native end counts what still refers to the chunk: a
# view of which there is another view cannot be released, and a traceback would keep it.


@contextmanager
def write_block(owner: object, writer: RingWriter, timeout: float | None) -> Iterator[memoryview]:
    """Publishes the chunk unless the block raises, or leaves something that could change it."""
    view = writer.begin_write(timeout)
    try:
        yield view
    except BaseException:
        _release(view)
        del view
        writer.end_write(publish=False)
        raise
    _release(view)
    del view
    writer.end_write(publish=True)
    del owner


@contextmanager
def read_block(
    owner: object, reader: RingReader, timeout: float | None, cancel: threading.Event | None
) -> Iterator[memoryview]:
    """Gives the chunk back, however the block ends; later if something still refers to it."""
    view = reader.begin_read(timeout, cancel)
    try:
        yield view
    except BaseException:
        _release(view)
        del view
        with suppress(
            ViewInUse
        ):  # the traceback refers to what the block made; its error says more
            reader.end_read()
        raise
    _release(view)
    del view
    reader.end_read()
    del owner


def _release(view: memoryview) -> None:
    with suppress(BufferError):
        view.release()
