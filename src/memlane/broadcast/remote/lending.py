"""Memory that libzmq sends from where it lies.

pyzmq keeps what was lent until libzmq is done with it; it does so with a thread and a context for
the whole process. The first lender here starts them, so that no signal handler can raise in the
middle of that during a send, and the last one ends them again, unless they ran before the first:
then they are somebody else's.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import zmq
from zmq.utils.garbage import gc as collector

_lock = threading.Lock()
_lenders = 0
_is_foreign = False
_MOST_SECONDS = 1.0


def begin() -> None:
    """One writer more may send without a copy."""
    global _lenders, _is_foreign
    with _lock:
        if _lenders == 0:
            _is_foreign = collector.is_alive()
            zmq.Frame(b"first", copy=False)
        _lenders += 1


def end() -> None:
    """One writer less; its context is gone, and nothing of it on the way."""
    global _lenders
    with _lock:
        _lenders -= 1
        if _lenders or _is_foreign or not collector.is_alive():
            return
        # What was given back is collected in order: when this is, all of ours is.
        last = zmq.Frame(b"last", copy=False, track=True)
        tracker = last.tracker
        del last
        with suppress(zmq.NotDone):
            tracker.wait(_MOST_SECONDS)
        if not collector.refs:
            collector.stop()


def _forget_parent() -> None:
    global _lock, _lenders
    _lock, _lenders = threading.Lock(), 0


os.register_at_fork(after_in_child=_forget_parent)
