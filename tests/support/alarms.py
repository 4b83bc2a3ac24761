"""Signal handlers that run at some moment during a block."""

import gc
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Alarm(Exception):
    pass


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """The handler raises after about that time, unless the block is over by then."""
    is_on = True
    before = signal.getsignal(signal.SIGALRM)

    def handler(_number: int, _frame: FrameType | None) -> None:
        if is_on:
            raise Alarm

    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        is_on = False
        _resume(before, left)


@contextmanager
def alarms(handler: Callable[[], object], every: float, first: float = 0.0) -> Iterator[None]:
    """It runs again and again, after `first` seconds, or `every` so many, until the block is over.

    CPython 3.11 may overlook a signal as long as the main thread runs alone, if another thread
    looked whether there is one when it came: so one alarm is not enough for a test to end.
    No garbage is collected meanwhile: what a handler raises in a finalizer of an earlier test's
    objects would be printed, and pytest would call it this test's failure.
    """
    left, _ = signal.setitimer(signal.ITIMER_REAL, 0)
    before = signal.signal(signal.SIGALRM, lambda *_: handler())
    collects = gc.isenabled()
    gc.disable()
    try:
        signal.setitimer(signal.ITIMER_REAL, first or every, every)
        yield
    finally:
        if collects:
            gc.enable()
        _resume(before, left)


def _resume(handler: Any, seconds: float) -> None:
    """The deadline of the test, which has the same timer (tests/conftest.py), goes on."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
