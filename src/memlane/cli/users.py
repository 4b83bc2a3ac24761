"""Root's view of other users, here and in containers: a command runs as each of them, in a process
of its own.

Who looks as a user can open, trace and remove only what that user can, whatever the user has put
into /dev/shm and /proc. Nothing of root's is in that process: no terminal, no open file, no right,
no environment; and the user cannot trace it. It may be ended or stopped, or hang in the kernel, so
nobody waits for it for long.
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
import struct
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

from memlane.cli import writing
from memlane.cli.containers import Container, containers, entered, owners
from memlane.errors import InvalidArgument
from memlane.inspect.segment import FOLDER, doubt_slots, look_into
from memlane.inspect.stacks import take_no_stacks

_MOST_USERS = 32  # beside root, and as many in containers; more are not looked at
_MOST_BYTES = 16 << 20  # of one answer
_SECONDS = 15.0
_CPU_SECONDS = 30
_MEMORY = 8 << 30  # of addresses
_REAPED_WITHIN = 0.2  # seconds for those that were killed; init reaps the others
_NO_GROUP = 65534
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_NO_RIGHTS_OF_THIS = struct.pack("=Ii", 0x20080522, 0)  # the third version; this thread


@dataclass(frozen=True)
class User:
    """A user, the group as which its processes run, and the container whose /dev/shm is meant."""

    uid: int
    gid: int
    container: Container | None = None

    @property
    def name(self) -> str:
        """As the machine knows it, or its number; a container has users of its own."""
        with suppress(KeyError):
            if self.container is None:
                return pwd.getpwuid(self.uid).pw_name
        return str(self.uid)

    @property
    def title(self) -> str:
        """For people."""
        if self.container is None:
            return f"user {self.name} ({self.uid})"
        return f"user {self.uid} of {self.container.name}"


@dataclass(frozen=True)
class Answer:
    """The output of a command that ran as a user.

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
    found: set[int] = set()
    device = os.stat(FOLDER).st_dev
    with suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            with suppress(OSError):  # removed meanwhile
                found.add(entry.stat(follow_symlinks=False).st_uid)
    users = [user_of(uid) for uid in sorted((found | owners(device)) - {0})]
    return users[:_MOST_USERS], len(users[_MOST_USERS:])


def in_containers() -> tuple[list[User], int, int]:
    """The users that have a file in the /dev/shm of a container, root included, and how many more
    there are: first one of each container, then the next ones. And the number of processes that
    root has no right to look at."""
    seen, unseen = containers()
    found = [[User(uid, _NO_GROUP, container) for uid in uids] for container, uids in seen]
    users = [each for each in chain.from_iterable(zip_longest(*found)) if each is not None]
    return users[:_MOST_USERS], len(users[_MOST_USERS:]), unseen


def user_of(uid: int) -> User:
    """The user with its first group, or with none that has rights if this machine knows neither."""
    with suppress(KeyError):
        return User(uid, pwd.getpwuid(uid).pw_gid)
    return User(uid, _NO_GROUP)


def answers_as(
    users: Iterable[User], command: Callable[[], int], seconds: float
) -> list[tuple[User, Answer]]:
    """Returns what the command prints and its exit code as each of the users, all at once, within
    that time."""
    width = writing.console().width if sys.stdout.isatty() else None
    until = time.monotonic() + seconds
    asked: list[tuple[User, _Aside]] = []
    try:
        for user in users:
            asked.append((user, _Aside(user, command, width)))
        _read(until, [aside for _, aside in asked])
        late = f"no answer within {seconds:g} s"
        return [(user, aside.answer(late)) for user, aside in asked]
    finally:
        _end([aside for _, aside in asked])


def _read(until: float, asides: list[_Aside]) -> None:
    """Reads what each of them writes, until all have ended or it is too late."""
    by_pipe, poller = {aside.pipe: aside for aside in asides if aside.pipe >= 0}, select.poll()
    for pipe in by_pipe:
        poller.register(pipe, select.POLLIN)
    while by_pipe and (ready := poller.poll(1000 * max(0.0, until - time.monotonic()))):
        for pipe, _ in ready:
            if not by_pipe[pipe].read():
                poller.unregister(pipe)
                del by_pipe[pipe]


def _end(asides: list[_Aside]) -> None:
    """Kills those that go on, with what they have started. One that hangs in the kernel is left."""
    for aside in asides:
        aside.kill()
    until = time.monotonic() + _REAPED_WITHIN
    for aside in asides:
        aside.reap(until)


def answers_of_all(
    command: Callable[[], int], more_seconds: float
) -> tuple[list[tuple[User, Answer]], int, int]:
    """Returns what the command finds as root, then as each other user; how many users are left out,
    and how many processes.

    Args:
        more_seconds: which the command takes beside looking.
    """
    users, left = others()
    inside, left_inside, unseen = in_containers()
    own = _answer(command)  # root's, and what it imports others may not be able to read
    sysconfig.get_paths()
    answers = answers_as(users + inside, command, _SECONDS + more_seconds)
    return [(User(0, 0), own), *answers], left + left_inside, unseen


def print_all(command: Callable[[], int], as_json: bool, more_seconds: float) -> int:
    """Prints the `answers_of_all`; returns the exit code: that
    of somebody who is stuck comes first, then that of a look that failed."""
    answers, left, unseen = answers_of_all(command, more_seconds)
    shown = [(user, answer) for user, answer in answers if answer.code != 2]
    if as_json:
        listed = [_as_json(user, answer) for user, answer in shown]
        left_out = {"users_left_out": left, "processes_left_out": unseen}
        writing.print_json({"users": listed, **left_out})
    else:
        console = writing.console()
        for user, answer in shown:
            lines = answer.text.splitlines()
            more = [f"not looked at: {answer.problem}"] if answer.problem else []
            writing.print_lines(console, [f"{user.title}:", *lines, *more])
        if left:
            writing.print_lines(console, [f"and {left} users more, who are not looked at"])
        if unseen:
            words = "processes more, which root without CAP_SYS_PTRACE cannot look at"
            writing.print_lines(console, [f"and {unseen} {words}"])
    if not shown:
        raise InvalidArgument(answers[0][1].problem)
    codes = {answer.code for _, answer in shown} | ({4} if left or unseen else set())
    return next((code for code in (1, 4, 3) if code in codes), 0)


def _as_json(user: User, answer: Answer) -> dict[str, Any]:
    made: dict[str, Any] = {"user": user.name, "uid": user.uid, "container": None}
    if (inside := user.container) is not None:
        made["container"] = {"pod": inside.pod, "ids": list(inside.ids), "pid": inside.pids[0]}
    try:
        found = json.loads(answer.text) if answer.text else {}
    except ValueError:
        found = {}
    return {**found, **made, "problem": answer.problem or None}


class _Aside:
    """A process that runs a command as a user."""

    def __init__(self, user: User, command: Callable[[], int], width: int | None) -> None:
        self.pipe, self._data, self._pid, self._problem = -1, bytearray(), 0, ""
        sys.stdout.flush()
        pipe, there = os.pipe()
        try:
            self._pid = os.fork()
        except OSError as error:
            self._problem = f"no process can be started: {error.strerror}"
            os.close(pipe)
            os.close(there)
            return
        if self._pid == 0:
            code = 70
            try:
                _answer_as(user, command, width, there)
                code = 0
            finally:
                os._exit(code)
        os.close(there)
        self.pipe, self._has_ended = pipe, False

    def read(self) -> bool:
        """Takes what there is; returns whether there may be more."""
        part = os.read(self.pipe, 1 << 16)
        self._data += part
        self._has_ended = not part
        if len(self._data) > _MOST_BYTES:
            self._problem = "its answer is too long"
        return bool(part) and not self._problem

    def answer(self, late: str) -> Answer:
        """Returns what it has written; `late` is the problem of one that goes on."""
        if self._problem or not self._has_ended:
            return Answer(4, problem=self._problem or late)
        try:
            code, text, problem = json.loads(self._data)
            return Answer(int(code), str(text), str(problem))
        except (ValueError, TypeError):
            return Answer(4, problem="the process that looked has ended without an answer")

    def kill(self) -> None:
        """It leads a session; it is not reaped yet, so the number is no other's."""
        if self._pid:
            for kill in (os.killpg, os.kill):
                with suppress(ProcessLookupError):  # it does not lead one yet
                    kill(self._pid, signal.SIGKILL)

    def reap(self, until: float) -> None:
        """Waits for its end, which closes the pipe, until then."""
        if self._pid:
            poller = select.poll()
            poller.register(self.pipe, 0)
            poller.poll(1000 * max(0.0, until - time.monotonic()))
            os.waitpid(self._pid, os.WNOHANG)
            os.close(self.pipe)
            self._pid = 0


def _answer_as(user: User, command: Callable[[], int], width: int | None, pipe: int) -> None:
    """In the process of its own."""
    _leave(pipe)
    if width is not None:
        writing.print_to_width(width)
    made = _answer(lambda: _look_as(user, command))
    with open(3, "wb") as file:
        file.write(json.dumps([made.code, made.text, made.problem]).encode())


def _look_as(user: User, command: Callable[[], int]) -> int:
    place = None if user.container is None else entered(user.container, user.uid)
    become(user)
    doubt_slots()
    if place is not None:
        look_into(place)
    if user.uid == 0:  # a path in a container may lead to a device that opens for root's number
        take_no_stacks("of a container's root none is taken")
    return command()


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
    """Leaves the terminal, the environment, which its programs would show, and all files but the
    pipe, which becomes the fourth."""
    os.setsid()
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    ctypes.CDLL(None).clearenv()  # libraries add to it behind Python's back
    os.environ.clear()
    os.environ.update(kept)
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
    """This process is that user's from now on, for good, and has no right of root's.

    Raises:
        OSError: it cannot.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    os.setgroups([])
    os.setresgid(user.gid, user.gid, user.gid)
    for right in range(64):  # root's number comes with rights, and a program's file may
        libc.prctl(_PR_CAPBSET_DROP, right, 0, 0, 0)  # beyond the last one it fails
    os.setresuid(user.uid, user.uid, user.uid)
    _checked(libc.capset(_NO_RIGHTS_OF_THIS, bytes(24)))
    _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _checked(libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0))


def _checked(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), "cannot become another user")
