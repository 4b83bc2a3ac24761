"""Processes that are to attach: notices one that ends before it has attached, and nothing else."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from memlane._base.arguments import integer_from
from memlane._base.descriptors import closing, open_into
from memlane._base.processes import status
from memlane.errors import InvalidArgument, InvalidType, ReaderDied, system_fault

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable

_LARGEST_PID = 2**31 - 1


class Starting:
    """The `watch` of a wait until all have attached, whose `is_set` it calls.

    A pidfd tells that a process has ended. Where pidfd_open is refused (Linux below 5.3, and older
    container runtimes) each `is_set`, ten a second, looks at /proc instead.

    Args:
        attached: returns the pids, of this pid namespace, of all that have ever attached; the
            wait itself reports their deaths.
        processes: objects with `pid`, or pids, of this pid namespace.
    """

    def __init__(self, attached: Callable[[], Container[int]], processes: Iterable[object]) -> None:
        self._attached = attached
        if isinstance(processes, Mapping):  # its keys, perhaps ranks, could be taken for pids
            raise InvalidType("processes must be a sequence: pass the values() of the mapping")
        self._processes = {_pid_of(process): process for process in processes}
        self._opened: list[int] = []
        self._close = closing(self._opened)
        self._pollers = [select.poll()]
        self._watched: dict[int, int] = {}  # pids by descriptor
        self._looked_at: dict[int, int] = {}  # start times by pid, of those without one

    def __enter__(self) -> Self:
        try:
            for pid in self._processes:
                descriptor = self._open(pid)
                if descriptor is None:
                    self._look_at(pid)
                    continue
                self._pollers[0].register(descriptor, select.POLLIN)
                self._watched[descriptor] = pid
            return self  # after no call, so that no signal handler comes between
        except BaseException:
            self._close()
            raise

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def pids(self) -> list[int]:
        """Those whose ends a native wait is to notice at once."""
        return list(self._processes)

    def wake(self, poller: select.poll) -> None:
        """Makes the end of a process wake the thread that sleeps on `poller`."""
        for descriptor in self._watched:
            poller.register(descriptor, select.POLLIN)
        self._pollers.append(poller)

    def is_set(self) -> bool:
        """Raises ReaderDied if a process has ended that never attached; else False."""
        for descriptor, _ in self._pollers[0].poll(0):
            self._ended(self._watched[descriptor])
            del self._watched[descriptor]
            for poller in self._pollers:
                poller.unregister(descriptor)
        for pid, started in list(self._looked_at.items()):
            if status(pid) in (("unknown", None), ("running", started), ("stopped", started)):
                continue
            self._ended(pid)
            del self._looked_at[pid]
        return False

    def _open(self, pid: int) -> int | None:
        """Opens a descriptor that is readable once the process has ended.

        Returns:
            None if the process is gone already, or if this system refuses pidfd_open.
        """
        try:
            return open_into(self._opened, os.pidfd_open, pid)
        except OSError as error:
            if error.errno in (errno.ESRCH, errno.ENOSYS, errno.EPERM):
                return None
            why = error.errno or errno.EINVAL
            raise system_fault(why, f"cannot watch process {pid}") from None

    def _look_at(self, pid: int) -> None:
        state, started = status(pid)
        if state == "dead":
            self._ended(pid)
        elif started is not None:  # else /proc does not show it: the timeout alone ends the wait
            self._looked_at[pid] = started

    def _ended(self, pid: int) -> None:
        if pid not in self._attached():
            exitcode = _exitcode(pid, self._processes[pid])
            raise ReaderDied(None, pid, " before it attached to the queue", exitcode)


def _exitcode(pid: int, process: object) -> int | None:
    """Its exit code, negative for a signal, if this process has started it. Leaves the reaping to
    the caller's own code."""
    with suppress(ChildProcessError):  # another's, or reaped
        if ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
    known = getattr(process, "exitcode", None), getattr(process, "returncode", None)
    return next((code for code in known if isinstance(code, int)), None)


def _pid_of(process: Any) -> int:
    pid = getattr(process, "pid", process)
    if pid is None:
        raise InvalidArgument(f"{process!r} has no pid: start it before you wait for it")
    try:
        return integer_from("the pid of a process", pid, 1, _LARGEST_PID)
    except InvalidType:
        raise InvalidType(
            f"processes must be objects with a pid, or pids, not {type(process).__name__}"
        ) from None
