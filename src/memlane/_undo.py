"""Undoes a step when a later one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises anything; at once, not when the traceback is dropped."""
    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()
