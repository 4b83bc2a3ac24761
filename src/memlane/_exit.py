"""What was not closed is abandoned when the interpreter exits, before anybody waits for children.

`weakref.finalize` alone may come too late: multiprocessing joins its children at exit, in a
function that it registers when it first starts one, and functions of `atexit` run last in, first
out. A child that waits for a queue of this process would then be joined for ever.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable
from typing import Any

_finalizers: weakref.WeakKeyDictionary[object, weakref.finalize[[], Any]] = (
    weakref.WeakKeyDictionary()
)


def abandoned_at_exit(owner: object, abandon: Callable[[], None]) -> weakref.finalize[[], Any]:
    """Calls `abandon` when `owner` goes, or at exit."""
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
