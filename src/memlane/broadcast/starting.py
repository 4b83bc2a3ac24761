"""Processes that are to attach: notices one that ends before it has attached, and nothing else."""

from __future__ import annotations

import errno
import os
import select
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Self

from memlane._base.arguments import integer_from
from memlane._base.diagnosis import participant
from memlane.errors import InvalidArgument, InvalidType, ReaderDied, system_fault

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memlane._native import RingReader, RingWriter


class Starting:
    """The `watch` of a native `wait_until_ready`, which asks it every 100 ms while it waits.

    Args:
        processes: objects with `pid`, or pids, of this pid namespace.
    """

    def __init__(self, end: RingWriter | RingReader, processes: Iterable[object]) -> None:
        self._end = end
        self._pids = [_pid_of(process) for process in processes]
        self._stack = ExitStack()
        self._poll = select.poll()
        self._watched: dict[int, int] = {}  # pids by descriptor

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for pid in self._pids:
                descriptor = _opened(pid)
                if descriptor is None:
                    self._ended(pid)
                    continue
                stack.callback(os.close, descriptor)
                self._poll.register(descriptor, select.POLLIN)
                self._watched[descriptor] = pid
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def is_set(self) -> bool:
        """Raises ReaderDied if a process has ended that never attached; else False."""
        for descriptor, _ in self._poll.poll(0):
            self._poll.unregister(descriptor)
            self._ended(self._watched[descriptor])
        return False

    def _ended(self, pid: int) -> None:
        """One that has attached is the native wait's concern, dead or closed."""
        slots = range(1 + len(self._end.ranks))
        seen = (participant(self._end, slot) for slot in slots)
        if not any(who.pid == pid and who.is_pid_of_here for who in seen):
            raise ReaderDied(None, pid, " before it attached to the queue")


def _pid_of(process: Any) -> int:
    pid = getattr(process, "pid", process)
    if pid is None:
        raise InvalidArgument(f"{process!r} has no pid: start it before you wait for it")
    try:
        return integer_from("the pid of a process", pid, 1)
    except InvalidType:
        raise InvalidType(
            f"processes must be objects with a pid, or pids, not {type(process).__name__}"
        ) from None


def _opened(pid: int) -> int | None:
    """A descriptor that is readable once the process has ended; None if it is gone already."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    except OSError as error:
        raise system_fault(error.errno or errno.EINVAL, f"cannot watch process {pid}") from None
