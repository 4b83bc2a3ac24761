"""Whole or not at all: what is taken back if what follows fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises, whatever; at once, and not when the traceback goes."""
    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()
