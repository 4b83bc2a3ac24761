"""Chunks filled and read by hand: what `acquire_write` and `acquire_read` return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memlane.errors import ViewInUse

if TYPE_CHECKING:
    import threading

    from memlane._native import RingReader, RingWriter


@contextmanager
def write_block(writer: RingWriter, timeout: float | None) -> Iterator[memoryview]:
    """Publishes the chunk unless the block raises, or leaves something that could change it."""
    view = writer.begin_write(timeout)
    try:
        yield view
        _release(view, "nothing was published")
    except BaseException:
        writer.end_write(publish=False)
        raise
    writer.end_write(publish=True)


@contextmanager
def read_block(
    reader: RingReader, timeout: float | None, cancel: threading.Event | None
) -> Iterator[memoryview]:
    """Gives the chunk back, however the block ends."""
    view = reader.begin_read(timeout, cancel)
    try:
        yield view
        _release(view, "the chunk was given back, its bytes will change")
    finally:
        reader.end_read()


def _release(view: memoryview, consequence: str) -> None:
    try:
        view.release()
    except BufferError:
        raise ViewInUse(
            f"something still refers to the chunk at the end of its block; {consequence}"
        ) from None
