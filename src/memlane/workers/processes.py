"""Starts and ends the processes of workers. Each leads a process group of its own.

So Ctrl-C reaches the group's process alone, which ends its workers; and what a worker has started
ends with it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, cast

from memlane._base.deadline import Deadline
from memlane._base.lifetime import start_thread
from memlane._importing import fork_waits
from memlane._locks import Lock
from memlane.errors import InvalidArgument
from memlane.workers.output import Output, redirect
from memlane.workers.serving import serve
from memlane.workers.ticket import Ticket

_log = logging.getLogger("memlane.workers")

_LONGEST_SECONDS = 1e6  # that poll() takes, whose milliseconds are an int
_OUTPUT_SECONDS = 0.5  # for what a worker printed last; what it has left behind may print more
_ORPHAN_SECONDS = 1.0  # for a worker in a call, when the process that started it has died


@dataclass(frozen=True)
class Starter:
    """Starts workers by multiprocessing."""

    method: str
    env: Callable[[int], Mapping[str, str]]
    factory: Callable[..., object] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    prefix: str | None = None

    def prepare(self) -> None:
        """Raises InvalidArgument if this process, or a method of that name, cannot start any, or
        if the prefix has other fields than rank and pid."""
        try:
            _ = self.prefix and self.prefix.format(rank=0, pid=0)
        except (ValueError, LookupError, AttributeError) as error:
            raise InvalidArgument(f"prefix may have {{rank}} and {{pid}}: {error!r}") from None
        methods = multiprocessing.get_all_start_methods()
        if self.method not in methods:
            raise InvalidArgument(f"start_method must be one of {methods}, not {self.method!r}")
        if getattr(multiprocessing.current_process(), "_inheriting", False):
            raise InvalidArgument(
                "a worker that starts imports this module, and would start workers itself: make "
                'the group under `if __name__ == "__main__":`'
            )
        # Else the first start does it while Ctrl-C is blocked, and these servers, with all that the
        # program starts by them later, would have it blocked, too.
        if self.method != "fork":
            resource_tracker.ensure_running()
        if self.method == "forkserver":
            forkserver.ensure_running()

    def __call__(self, ticket: Ticket) -> Any:
        """Starts the worker's process. Its environment is changed before its Python begins; if that
        is forked, first of all."""
        context: Any = multiprocessing.get_context(self.method)
        changes = dict(self.env(ticket.rank))
        output = None if self.prefix is None else Output()
        writers = output.writers if output is not None else ()
        process = context.Process(
            target=_run,
            args=(ticket, changes, writers, self.factory, self.args, self.kwargs),
            name=f"worker-{ticket.rank}",
        )
        if self.method == "spawn":
            with fork_waits, _changed_environment(changes):  # nobody else's child gets it
                process.start()
        else:  # it is changed in the child
            process.start()
        if output is not None and self.prefix is not None:
            try:
                output.begin(self.prefix.format(rank=ticket.rank, pid=process.pid))
            except BaseException:  # no thread is left for it
                process.kill()
                process.join()
                raise
            process.memlane_output = output
        return process


@contextmanager
def _changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    try:
        os.environ.update(changes)
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def _run(
    ticket: Ticket,
    env: Mapping[str, str],
    output: Sequence[connection.Connection],
    factory: Any,
    args: Any,
    kwargs: Any,
) -> None:
    """The main function of a worker's process."""
    redirect(output)
    leads = False
    with suppress(PermissionError):
        os.setpgid(0, 0)
        leads = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drops one that has come meanwhile
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    leave = _kill_group if leads else os._exit
    watch = threading.Thread(target=_leave_with_parent, args=(leave,), name="memlane-parent")
    watch.daemon = True
    start_thread(watch)
    os.environ.update(env)  # again, for spawn; others have not got it yet
    try:
        serve(ticket, factory, *args, **kwargs)
    except SystemExit as error:
        if not isinstance(error.code, str):  # the group lives, and sees to the rest
            raise
        print(error.code, file=sys.stderr, flush=True)
        leave(1)


def _kill_group(_code: int) -> None:
    os.killpg(0, signal.SIGKILL)


def _leave_with_parent(leave: Callable[[int], object]) -> None:
    """Ends a worker whose group died while it was in a call; the queues end all others."""
    parent = multiprocessing.parent_process()
    pid = 0 if parent is None else parent.pid or 0
    try:
        # Not its sentinel, which forked siblings keep open.
        watched = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    except OSError:  # this system has none
        return
    else:
        connection.wait([watched])
    threading.main_thread().join(_ORPHAN_SECONDS)
    leave(1)


class Process:
    """The process that has a rank. `given` has pid, exitcode, join and kill, or is None.

    Attributes:
        is_over: it has ended, and was reaped here.
        is_killed: by the group, while it ran.
    """

    def __init__(self, rank: int, given: Any) -> None:
        self.rank, self._given = rank, given
        self.pid: int = getattr(given, "pid", None) or 0
        self.is_over = self.is_killed = False
        self._exitcode: int | None = None
        self._reaps = Lock()  # multiprocessing loses the exit code if two threads reap at once

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while it runs, or if it is unknown."""
        with self._reaps:
            if self.is_over:
                return self._exitcode
            return cast("int | None", getattr(self._given, "exitcode", None))

    def has_ended(self, seconds: float | None) -> bool:
        """Waits at most that long for its end; does not reap it."""
        if self.is_over or not self.pid or (not self._is_unreaped() and self.exitcode is not None):
            return True
        try:
            watched = os.pidfd_open(self.pid)
        except OSError:  # it has ended, or this system has none
            with self._reaps:
                if not self.is_over and hasattr(self._given, "join"):
                    self._given.join(seconds)
            return self.is_over or self.exitcode is not None
        try:
            bounded = None if seconds is None or seconds > _LONGEST_SECONDS else seconds
            return bool(connection.wait([watched], bounded))
        finally:
            os.close(watched)

    def end(self, seconds: float) -> None:
        """Kills it unless it ends within that time; kills what it has started, and reaps it."""
        if self.is_over:
            return
        if not self.has_ended(seconds):
            if seconds:
                text = "worker %d (pid %d) has not ended within %.1f s: killed"
                _log.warning(text, self.rank, self.pid, seconds)
            self.kill()
        self._kill_family()
        with self._reaps:
            if self.is_over:
                return
            if hasattr(self._given, "join"):
                self._given.join()
            self._exitcode = self.exitcode
            self.is_over = True
            if isinstance(self._given, BaseProcess):
                self._given.close()  # its descriptors
            if hasattr(self._given, "memlane_output"):
                self._given.memlane_output.end(_OUTPUT_SECONDS)

    def kill(self) -> None:
        """Kills it, and what it has started, at once."""
        self.is_killed = True
        if not self.is_over and not self._kill_family() and hasattr(self._given, "kill"):
            with suppress(ValueError):  # another thread has just reaped it
                self._given.kill()

    def _kill_family(self) -> bool:
        """Kills its process group, if it leads one; returns whether that was done."""
        if not self._is_unreaped():  # else its number may be another's by now
            return False
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
            return True
        return False

    def _is_unreaped(self) -> bool:
        """Returns whether it is a child of this process, running or ended, and its number its
        own."""
        try:
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        except OSError:
            return False
        return self.pid > 0


@contextmanager
def shielded(*, blocks_interrupts: bool) -> Iterator[None]:
    """Python's signal handlers are called after the block, so that a process that starts in it is
    known even if one raises. With `blocks_interrupts` a process that is not a forkserver's has
    Ctrl-C blocked until it leads a group of its own.

    Blocking the signals is not enough: the mask belongs to one thread, and the kernel delivers to
    another. A signal that comes a second time is handled at once, so that a start that hangs ends.
    """
    came: dict[int, FrameType | None] = {}
    handlers, pid, is_over = _handlers(), os.getpid(), False

    def defer(number: int, frame: FrameType | None) -> None:
        # It is over, and another handler's error has kept this one from being put back; or this is
        # a worker that was forked.
        if is_over or os.getpid() != pid or number in came:
            handlers[number](number, frame)
        else:
            came[number] = frame

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        if blocks_interrupts:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for number in handlers:
            signal.signal(number, defer)
        yield
    finally:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        finally:
            is_over = True
            try:  # but where the block has put another
                left = [one for one in handlers.items() if signal.getsignal(one[0]) is defer]
                _call_each(signal.signal, left)
            finally:
                _call_each(lambda number, frame: handlers[number](number, frame), [*came.items()])


def _handlers() -> dict[int, Callable[[int, FrameType | None], object]]:
    """Returns those of Python's that may be called now: only the main thread calls any."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in sorted(signal.valid_signals())}
    # asyncio's raises nothing, and would have to be restarted as it was: see siginterrupt(3).
    return {
        number: handler
        for number, handler in found.items()
        if callable(handler) and getattr(handler, "__name__", "") != "_sighandler_noop"
    }


def _call_each(call: Callable[..., object], last_first: list[tuple[Any, ...]]) -> None:
    """Calls it for all of them, whichever raises."""
    if last_first:
        try:
            call(*last_first.pop())
        finally:
            _call_each(call, last_first)


class Processes:
    """All processes of a group: those that have its ranks, and their predecessors until they have
    ended. A forked child ends none."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._all: list[Process] = []
        self._by_rank: dict[int, Process] = {}

    @property
    def are_here(self) -> bool:
        """This process has started them."""
        return os.getpid() == self._pid

    @property
    def pids(self) -> list[int]:
        """Those that are known."""
        return [process.pid for process in self._by_rank.values() if process.pid]

    def add(self, process: Process) -> None:
        """Adds one that has started, in the place of the one that had its rank."""
        self._all = [*(p for p in self._all if not p.is_over), process]
        self._by_rank[process.rank] = process

    def of(self, rank: int) -> Process:
        """Returns the one that has the rank."""
        return self._by_rank[rank]

    def find(self, rank: int) -> Process | None:
        """Returns the same, or None if the rank had none yet."""
        return self._by_rank.get(rank)

    def rank_of(self, pid: int) -> int | None:
        """Returns the rank of a process; None if it has none."""
        return next((rank for rank, p in self._by_rank.items() if p.pid == pid), None)

    def kill_late(self, rank: int, name: str, seconds: float) -> None:
        """Kills one that has not ended its call in time."""
        if (process := self._by_rank.get(rank)) is not None:
            text = "worker %d (pid %d) has not ended %s() within %s s: killed"
            _log.warning(text, rank, process.pid, name, seconds)
            process.kill()

    def end(self, seconds: float) -> None:
        """Lets them end, at most that many seconds; then kills the others."""
        if not self.are_here:
            return
        deadline = Deadline(seconds)
        while self._all:
            self._all[-1].end(deadline.left())
            self._all.pop()

    def kill(self) -> None:
        """Kills all at once."""
        if self.are_here:
            for process in self._all:
                process.kill()
            self.end(0.0)
