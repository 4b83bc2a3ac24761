"""Undoes a step when a later one fails, and ends what a signal handler may interrupt."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises anything; at once, not when the traceback is dropped."""
    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()


def finish(finalizer: weakref.finalize[..., Any]) -> None:
    """Calls a finalizer, which must be idempotent. Unlike `finalizer()`, this can be repeated if a
    signal handler raised in it."""
    held = finalizer.peek()
    if held is not None:
        _, release, args, _ = held
        release(*args)
        finalizer.detach()
