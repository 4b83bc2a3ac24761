"""Root's view of other users: a command runs as each of them, in a process of its own.

Who looks as a user can open, trace and remove only what that user can, whatever the user has put
into /dev/shm and /proc. Nothing of root's is in that process: no terminal, no open file, no right
but, for py-spy, that to trace; and the user cannot trace it. It may be ended or stopped, so nobody
waits for it for long.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import pwd
import resource
import select
import signal
import stat
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from typing import Any

from memlane._base import processes
from memlane.cli import writing
from memlane.errors import InvalidArgument
from memlane.inspect.segment import FOLDER, doubt_slots

_MOST_USERS = 32  # beside root; more are not looked at
_MOST_BYTES = 16 << 20  # of one answer
_SECONDS = 15.0
_CPU_SECONDS = 30
_MEMORY = 8 << 30  # of addresses
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 8, 38, 47
_CAP_SYS_PTRACE, _RAISE, _VERSION_3 = 19, 2, 0x20080522


@dataclass(frozen=True)
class User:
    """A user, and the group as which its processes run."""

    uid: int
    gid: int

    @property
    def name(self) -> str:
        """As the machine knows it, or its number."""
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)


@dataclass(frozen=True)
class Answer:
    """What a command has printed, as a user.

    Attributes:
        code: its exit code.
        text: standard output.
        problem: why there is no answer, or what the command says is wrong.
    """

    code: int
    text: str = ""
    problem: str = ""


def others() -> tuple[list[User], int]:
    """The users but root that have a file in /dev/shm, with a name or held, and how many more there
    are."""
    found: dict[int, int] = {}
    device = os.stat(FOLDER).st_dev
    with suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with suppress(OSError):  # removed meanwhile
                facts = entry.stat(follow_symlinks=False)
                found.setdefault(facts.st_uid, facts.st_gid)
    for _, holder in processes.holders_in(FOLDER):
        with suppress(OSError):  # closed meanwhile
            facts = os.stat(holder.path)
            if facts.st_dev == device and stat.S_ISREG(facts.st_mode):
                found.setdefault(facts.st_uid, facts.st_gid)
    found.pop(0, None)
    users = [user_of(uid, gid) for uid, gid in sorted(found.items())]
    return users[:_MOST_USERS], len(users[_MOST_USERS:])


def user_of(uid: int, gid: int) -> User:
    """The user, with its first group if this machine knows it, else the one given."""
    with suppress(KeyError):
        return User(uid, pwd.getpwuid(uid).pw_gid)
    return User(uid, gid)


def answers_as(
    users: Iterable[User], command: Callable[[], int], seconds: float
) -> list[tuple[User, Answer]]:
    """What the command prints and returns as each of the users, all at once, within that time."""
    width = writing.console().width if sys.stdout.isatty() else None
    until = time.monotonic() + seconds
    asked: list[tuple[User, _Aside]] = []
    try:
        for user in users:
            asked.append((user, _Aside(user, command, width)))
        return [(user, aside.answer(until, seconds)) for user, aside in asked]
    finally:
        for _, aside in asked:
            aside.end()


def print_all(command: Callable[[], int], as_json: bool, more_seconds: float) -> int:
    """Prints what the command finds as root, then as each other user; returns the exit code: that
    of somebody who is stuck comes first, then that of a look that failed.

    Args:
        more_seconds: which the command takes beside looking.
    """
    users, left = others()
    own = _answer(command)  # root's, and what it imports others may not be able to read
    sysconfig.get_paths()
    answers = [(User(0, 0), own), *answers_as(users, command, _SECONDS + more_seconds)]
    shown = [(user, answer) for user, answer in answers if answer.code != 2]
    if as_json:
        listed = [_as_json(user, answer) for user, answer in shown]
        writing.print_json({"users": listed, "users_left_out": left})
    else:
        console = writing.console()
        for user, answer in shown:
            lines = answer.text.splitlines()
            more = [f"not looked at: {answer.problem}"] if answer.problem else []
            writing.print_lines(console, [f"user {user.name} ({user.uid}):", *lines, *more])
        if left:
            writing.print_lines(console, [f"and {left} users more, who are not looked at"])
    if not shown:
        raise InvalidArgument(answers[0][1].problem)
    codes = {answer.code for _, answer in shown}
    return next((code for code in (1, 4, 3) if code in codes), 0)


def _as_json(user: User, answer: Answer) -> dict[str, Any]:
    made: dict[str, Any] = {"user": user.name, "uid": user.uid}
    try:
        found = json.loads(answer.text) if answer.text else {}
    except ValueError:
        found = {}
    return {**found, **made, "problem": answer.problem or None}


class _Aside:
    """A process that runs a command as a user."""

    def __init__(self, user: User, command: Callable[[], int], width: int | None) -> None:
        self._pipe, there = os.pipe()
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid == 0:
            code = 70
            try:
                _answer_as(user, command, width, there)
                code = 0
            finally:
                os._exit(code)
        os.close(there)

    def answer(self, until: float, seconds: float) -> Answer:
        """Waits for it until then."""
        data, poller = bytearray(), select.poll()
        poller.register(self._pipe, select.POLLIN)
        while len(data) <= _MOST_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not poller.poll(1000 * left):
                return Answer(4, problem=f"no answer within {seconds:g} s")
            part = os.read(self._pipe, 1 << 16)
            if not part:
                break
            data += part
        try:
            code, text, problem = json.loads(data)
        except (ValueError, TypeError):
            return Answer(4, problem="the process that looked has ended without an answer")
        return Answer(int(code), str(text), str(problem))

    def end(self) -> None:
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)  # not reaped yet, so it is no other's number
            os.waitpid(self._pid, 0)
            os.close(self._pipe)
            self._pid = 0


def _answer_as(user: User, command: Callable[[], int], width: int | None, pipe: int) -> None:
    """In the process of its own."""
    _leave(pipe)
    become(user)
    doubt_slots()
    if width is not None:
        writing.print_to_width(width)
    made = _answer(command)
    with open(3, "wb") as file:
        file.write(json.dumps([made.code, made.text, made.problem]).encode())


def _answer(command: Callable[[], int]) -> Answer:
    printed = io.StringIO()
    try:
        with redirect_stdout(printed):
            return Answer(command(), printed.getvalue())
    except InvalidArgument as error:
        return Answer(2, problem=str(error))
    except Exception as error:  # all that this user's files and processes can cause
        return Answer(4, problem=f"the look has failed: {error!r}")


def _leave(pipe: int) -> None:
    """Leaves the terminal, and all files but the pipe, which becomes the fourth."""
    os.setsid()
    os.dup2(pipe, 3)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    os.closerange(4, os.sysconf("SC_OPEN_MAX"))
    for what, most in (
        (resource.RLIMIT_CPU, _CPU_SECONDS),
        (resource.RLIMIT_AS, _MEMORY),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(what, (most, most))
    with suppress(OSError, ValueError):  # the user's processes count against it
        resource.setrlimit(resource.RLIMIT_NPROC, (resource.RLIM_INFINITY,) * 2)
    os.chdir("/")


def become(user: User) -> None:
    """This process is that user's from now on, for good. What it executes may trace the user's
    processes as root may, where root may.

    Raises:
        OSError: it cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0))
    os.setgroups([])
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    header = struct.pack("<Ii", _VERSION_3, 0)
    traces = 1 << _CAP_SYS_PTRACE
    sets = (0, traces, traces, 0, 0, 0)  # effective, permitted, inheritable; the upper halves
    if libc.capset(header, struct.pack("<6I", *sets)) == 0:
        libc.prctl(_PR_CAP_AMBIENT, _RAISE, _CAP_SYS_PTRACE, 0, 0)
    else:
        _checked(libc.capset(header, bytes(24)))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "cannot become another user")
