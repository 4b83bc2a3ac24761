"""Abandons unclosed ends at interpreter exit, before multiprocessing joins its children.

`weakref.finalize` alone may run too late: multiprocessing registers the exit function that joins
its children when it first starts one, and `atexit` runs functions last in, first out. The join
never returns for a child that waits for a queue of this process.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any

from memlane._undo import undone_by

_finalizers: weakref.WeakKeyDictionary[object, weakref.finalize[[], Any]] = (
    weakref.WeakKeyDictionary()
)


def abandoned_at_exit(owner: object, abandon: Callable[[], None]) -> weakref.finalize[[], Any]:
    """Calls `abandon` when `owner` is collected, or at exit."""
    with undone_by(abandon):  # a signal handler may raise, and the first import takes long
        _come_before_multiprocessing()
        finalizer = weakref.finalize(owner, abandon)
        _finalizers[owner] = finalizer
    return finalizer


def _come_before_multiprocessing() -> None:
    if not _finalizers:
        import multiprocessing.util  # noqa: F401 - registers its function now, before ours

        atexit.unregister(_abandon_all)
        atexit.register(_abandon_all)


def _abandon_all() -> None:
    for finalizer in list(_finalizers.values()):
        finalizer()
