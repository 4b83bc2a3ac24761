"""Lends memory to libzmq, which sends it without a copy.

pyzmq keeps lent memory until libzmq is done with it, by one thread and one context per process. The
first writer starts both here, so that no signal handler can raise while a send starts them. The
last writer stops them, unless they ran before the first: then other code uses them.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import zmq
from zmq.utils.garbage import gc as collector

_lock = threading.RLock()  # a signal handler may close another writer meanwhile
_lenders = 0
_is_foreign = False
_MOST_SECONDS = 1.0


def begin() -> None:
    """Registers a writer that sends without copying."""
    global _lenders, _is_foreign
    with _lock:
        if _lenders == 0:
            _is_foreign = collector.is_alive()
            zmq.Frame(b"first", copy=False)
        _lenders += 1


def end() -> None:
    """Unregisters a writer. Its context must be gone, and nothing of it in flight."""
    global _lenders
    with _lock:
        _lenders -= 1
        if _lenders or _is_foreign or not collector.is_alive():
            return
        # Returned memory is collected in order: once this frame is, all of ours is.
        last = zmq.Frame(b"last", copy=False, track=True)
        tracker = last.tracker
        del last
        with suppress(zmq.NotDone):
            tracker.wait(_MOST_SECONDS)
        if not collector.refs:
            collector.stop()


def _forget_parent() -> None:
    global _lock, _lenders
    _lock, _lenders = threading.RLock(), 0


os.register_at_fork(after_in_child=_forget_parent)
