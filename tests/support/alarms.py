"""A signal handler that raises at some moment during a block."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Alarm(Exception):
    pass


@contextmanager
def alarm_after(seconds: float) -> Iterator[None]:
    """The handler raises after about that time, unless the block is over by then."""
    is_on = True

    def handler(_number: int, _frame: FrameType | None) -> None:
        if is_on:
            raise Alarm

    signal.signal(signal.SIGALRM, handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        is_on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
