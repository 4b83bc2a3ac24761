"""Opening by a name: waits until somebody serves it, asks for a place, and attaches. The steps are
the same for a thread and for asyncio, which differ in how they wait."""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from math import ceil
from typing import TypeVar

from memlane import errors
from memlane._base.deadline import Deadline
from memlane._base.diagnosis import Stall
from memlane._base.msgspec import msgspec
from memlane._base.processes import is_ending, is_stopped
from memlane._doors.admission import VERSION, Ask, Handed, Waits, answer_in, packet_of
from memlane._doors.folder import Folder, Line, served_name
from memlane._importing import fork_waits
from memlane._native import FolderWatch
from memlane.errors import LayoutMismatch, RankTaken, SegmentMissing, SegmentRefused, TimedOut

T = TypeVar("T")

_LONGEST = 86400.0  # seconds; poll() takes milliseconds as a 32-bit int
_SLICE = 0.1  # seconds without signals, while a server does not accept
_MOST_BYTES = 1 << 20  # of an answer
_HANG_UPS = 8  # of one process, without an answer


def opened(
    name: object,
    kind: str,
    rank: int | None,
    timeout: float | None,
    attach: Callable[[str, int], T],
) -> T:
    """Returns what `attach` makes of the handle and the rank that the server of `name` gives.

    Args:
        kind: of the object that is served.
        rank: the place; None: the next free one.
        timeout: in seconds.

    Raises:
        TimedOut: after `timeout`; it says what was missing.
        RankTaken: a living process has the place, or all of them.
        InvalidArgument: there is no such rank, or it is no `kind`.
        LayoutMismatch: the server has another version of memlane.
        SegmentRefused: the folder or the socket is not as memlane makes it for this user.
        MemlaneError: as `attach`.
    """
    with closing(_steps(name, kind, rank, timeout, attach)) as steps:
        while True:
            try:
                file, seconds = next(steps)
            except StopIteration as done:
                value: T = done.value
                return value
            poller = select.poll()
            poller.register(file, select.POLLIN)
            poller.poll(ceil(1000 * seconds))


async def aopened(
    name: object,
    kind: str,
    rank: int | None,
    timeout: float | None,
    attach: Callable[[str, int], T],
) -> T:
    """Is `opened` for asyncio. If it is cancelled, its place is free."""
    with fork_waits:
        import asyncio

    loop = asyncio.get_running_loop()
    with closing(_steps(name, kind, rank, timeout, attach)) as steps:
        while True:
            try:
                file, seconds = next(steps)
            except StopIteration as done:
                value: T = done.value
                return value
            is_readable = asyncio.Event()
            loop.add_reader(file, is_readable.set)
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await is_readable.wait()
            finally:
                loop.remove_reader(file)


_Steps = Generator[tuple[int, float], None, T]
"""Yields what to wait for: a descriptor that becomes readable, for so many seconds at most."""


def _steps(
    name: object,
    kind: str,
    rank: int | None,
    timeout: float | None,
    attach: Callable[[str, int], T],
) -> _Steps[T]:
    search = _Search(served_name(name), Deadline(timeout))
    while True:
        line = yield from search.line()
        with closing(line.file):
            refused: tuple[int, ...] = ()
            while True:
                handed = yield from search.ask(line, Ask(VERSION, kind, rank, refused))
                if handed is None:
                    break
                try:
                    return attach(handed.handle, handed.rank)
                except RankTaken:
                    if rank is not None:
                        raise
                    refused = tuple({*refused, handed.rank})
                except SegmentMissing:
                    if not _has_ended(line):
                        raise
                    break


class _Search:
    """One call that opens a name."""

    def __init__(self, name: str, deadline: Deadline) -> None:
        self._name = name
        self._deadline = deadline
        self._reason = f"nobody serves {name!r}"
        self._server: int | None = None  # the pid of one that has accepted and not answered
        self._hang_ups: list[int] = []
        self._stall = Stall(lambda waited: f"open waits for {waited:.0f} s: {self._text()}")

    def line(self) -> _Steps[Line]:
        """Returns a connection to whoever serves the name, once somebody does."""
        watch: FolderWatch | None = None
        while True:
            folder = Folder()
            while True:
                try:
                    line = folder.connect(self._name, self._deadline.left(_SLICE))
                    break
                except BlockingIOError:
                    path = folder.path_of(self._name)
                    self._reason = f"the process that serves {path} does not accept connections"
                    self._pause()
            if line is not None:
                return line
            self._reason = f"nobody serves {self._name!r} in {folder.path}"
            if watch is None:
                watch = FolderWatch(folder.address())  # before the next attempt
                continue
            yield from self._wait_for(watch.fileno())
            watch = None

    def ask(self, line: Line, ask: Ask) -> _Steps[Handed | None]:
        """Returns what the server gives, or None if it has ended. Raises what it refuses with."""
        pid = self._server = line.peer.pid
        self._reason = f"the process that serves {self._name!r} (pid {pid}) does not answer"
        has_answered = False
        with suppress(BrokenPipeError, ConnectionResetError):
            os.write(line.file.fileno(), packet_of(ask))
            while True:
                yield from self._wait_for(line.file.fileno())
                packet = os.read(line.file.fileno(), _MOST_BYTES)
                if not packet:
                    break
                try:
                    answer = answer_in(packet)
                except (msgspec.MsgspecError, UnicodeError) as error:
                    raise LayoutMismatch(
                        f"the process that serves {self._name!r} (pid {pid}) has sent no answer "
                        f"that this memlane knows: {error}"
                    ) from None
                has_answered, self._server = True, None
                if isinstance(answer, Handed):
                    return answer
                if not isinstance(answer, Waits):
                    raise _REFUSALS.get(answer.error, SegmentRefused)(answer.reason)
                self._reason = answer.reason
        self._server = None
        self._hang_ups = [] if has_answered else [*self._hang_ups, pid]
        if self._hang_ups[-_HANG_UPS:] == _HANG_UPS * [pid]:
            raise SegmentRefused(f"pid {pid} serves {self._name!r}, but ends every connection")
        return None

    def _wait_for(self, file: int) -> _Steps[None]:
        """Until the file is readable. Raises TimedOut."""
        poller = select.poll()
        poller.register(file, select.POLLIN)
        while not poller.poll(0):
            self._pause()
            yield file, self._stall.due(self._deadline.left(_LONGEST))

    def _pause(self) -> None:
        """Raises TimedOut if it is time, and logs a line if one is due."""
        if self._deadline.has_passed():
            timeout = self._deadline.timeout
            raise TimedOut(f"timed out after {timeout} s: {self._text()}", timeout)
        self._stall.report()

    def _text(self) -> str:
        stopped = self._server and is_stopped(self._server)
        return self._reason + (": it is stopped" if stopped else "")


_REFUSALS: dict[str, type[errors.MemlaneError]] = {
    "InvalidArgument": errors.InvalidArgument,
    "RankTaken": errors.RankTaken,
    "LayoutMismatch": errors.LayoutMismatch,
}


def _has_ended(line: Line) -> bool:
    """Returns whether the server has closed what it serves, or dies: its memory goes before its
    socket."""
    poller = select.poll()
    poller.register(line.file.fileno(), select.POLLIN)
    return bool(poller.poll(0)) or _is_over(line.peer.pid)


def _is_over(pid: int) -> bool:
    return pid != 0 and (is_ending(pid) or not os.path.exists(f"/proc/{pid}"))
