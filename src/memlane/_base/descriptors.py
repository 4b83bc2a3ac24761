"""Keeps memlane's descriptors away from the numbers of the standard streams.

In a process that has closed its standard streams, as daemons do, the next file that is opened gets
number 0, 1 or 2, and whatever any library prints is written into it.
"""

from __future__ import annotations

import fcntl
import os
import select
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from memlane.errors import system_fault

_LAST_STREAM = 2
_LONGEST_POLL = 3600.0  # seconds; poll() takes an int of milliseconds


def duplicate(descriptor: int) -> int:
    """Another descriptor of the same file, with a number of 3 or above."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _LAST_STREAM + 1)


def beyond_standard_streams(descriptor: int) -> int:
    """A descriptor of the same file with a number of 3 or above; the given one, if it has one."""
    if descriptor > _LAST_STREAM:
        return descriptor
    try:
        return duplicate(descriptor)
    finally:
        os.close(descriptor)


def open_into(opened: list[int], open_one: Callable[[int], int], argument: int) -> int:
    """Returns a descriptor that is in `opened` before a signal handler can raise."""
    opened.extend(map(open_one, (argument,)))
    if opened[-1] <= _LAST_STREAM:
        opened.extend(map(duplicate, opened[-1:]))  # the other is closed with it
    return opened[-1]


def closing(opened: list[int]) -> Callable[[], None]:
    """Returns a function that closes each once, in C, where no signal handler can come between."""
    return partial(deque[None](maxlen=0).extend, map(os.close, opened))


def is_readable_within(descriptor: int, seconds: float | None) -> bool:
    """Waits until it is, at most so many seconds (None: for ever); returns whether it is.
    select.select() takes numbers below 1024 only."""
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        left = _LONGEST_POLL if end is None else max(0.0, end - time.monotonic())
        if poller.poll(1000 * min(left, _LONGEST_POLL)):
            return True
        if left == 0:
            return False


def new_event() -> int:
    """Returns a new descriptor that one thread can wake another with. Raises SystemFault."""
    try:
        return beyond_standard_streams(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    except OSError as error:
        raise system_fault(error.errno or 0, "cannot open an eventfd") from None


def occupy_standard_streams() -> None:
    """Opens /dev/null in place of each standard stream that is closed, for libraries that open
    descriptors of their own. Programs that this process executes do not inherit that.

    Raises:
        OSError: the process cannot open a descriptor.
    """
    with suppress(FileNotFoundError, PermissionError):  # a container without /dev/null
        while (descriptor := os.open("/dev/null", os.O_RDWR)) <= _LAST_STREAM:
            pass
        os.close(descriptor)
