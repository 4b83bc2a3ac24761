"""Roles in processes of their own, and what a test can do to them."""

import ctypes
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.support.fresh import FRESH, this_fork_server
from tests.support.leaks import children_of
from tests.support.link import Link
from tests.support.places import PrivateShm
from tests.support.waiting import PATIENCE, cpu_seconds, sleeps, until_asleep

METHODS = ("fork", "spawn")
_ROOT = Path(__file__).parents[2]
_ENTER = (
    "import sys; sys.path[:0] = sys.argv[2:]; "
    "from tests.support.processes import main; sys.exit(main())"
)
_live: set["Peer"] = set()


class PeerGone(AssertionError):
    """The process ended without saying what was expected."""


class Peer:
    """One real process; ``pid`` is its id, and every wait for it has a deadline."""

    def __init__(
        self, role: Callable[..., Any], args: tuple[Any, ...], method: str, command: Sequence[str]
    ) -> None:
        self._link, theirs = Link.pair()
        self._status: int | None = None
        interpreter = FRESH if isinstance(command, PrivateShm) else command
        server = this_fork_server("roles", interpreter) if method == "spawn" else None
        if server is None:
            self.pid = os.fork()
        else:
            own_shm = getattr(command, "options", "")
            self.pid = server.fork(0, 1, 2, theirs.descriptor(), purpose=own_shm)
        if self.pid == 0:
            _run_child(theirs, role, args, method, command)
        theirs.close()
        self._pidfd = os.pidfd_open(self.pid)
        _live.add(self)
        if method == "spawn":
            self._link.tell((role, args))

    def tell(self, word: object = None) -> None:
        """Give the role its cue."""
        self._link.tell(word)

    def hear(self, timeout: float = PATIENCE) -> Any:
        """The next word of the role; its exception if it failed instead."""
        kind, *parts = self._receive(timeout)
        if kind == "value":
            raise PeerGone(f"process {self.pid} ended with {parts[0]!r} instead of a word")
        return parts[0]

    def has_spoken(self) -> bool:
        """Returns whether a word, or the end of the role, has not been heard yet."""
        return self._link.has_word()

    def result(self, timeout: float = PATIENCE) -> Any:
        """Returns what the role returned (its exception is raised here), once the process has
        ended."""
        kind, *parts = self._receive(timeout)
        if kind == "word":
            raise AssertionError(f"process {self.pid} said {parts[0]!r} instead of ending")
        self.join(timeout)
        return parts[0]

    def _receive(self, timeout: float) -> Any:
        try:
            kind, *parts = self._link.receive(timeout)
        except (EOFError, ConnectionResetError):
            raise PeerGone(f"process {self.pid} ended without a word") from None
        if kind == "error":
            self.join(timeout)
            error, text = parts
            if error is None:
                raise AssertionError(f"in process {self.pid}:\n{text}")
            error.add_note(f"in process {self.pid}:\n{text}")
            raise error
        return kind, *parts

    def join(self, timeout: float = PATIENCE) -> int:
        """Wait for the end of the process; returns its exit code, negative for a signal."""
        if self._status is None:
            if not select.select([self._pidfd], [], [], timeout)[0]:
                raise AssertionError(f"process {self.pid} did not end within {timeout} s")
            self._status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            os.close(self._pidfd)
            self._link.close()
            _live.discard(self)
        return self._status

    def kill(self) -> float:
        """Kill the process with signal 9; returns the monotonic time just before that."""
        moment = time.monotonic()
        os.kill(self.pid, signal.SIGKILL)
        self.join()
        return moment

    def stop(self) -> None:
        """Stop the process, and return when it has stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def resume(self) -> None:
        """Let a stopped process go on."""
        os.kill(self.pid, signal.SIGCONT)

    def until_asleep(self) -> None:
        """Return when the process is blocked in whatever call it made last."""
        until_asleep(self.pid)

    def cpu_seconds(self) -> float:
        """Processor time that the process has used."""
        return cpu_seconds(self.pid)

    def sleeps(self) -> int:
        """Returns how often its threads have given up the processor because they had to wait."""
        return sleeps(self.pid)


def start(
    role: Callable[..., Any],
    *args: Any,
    method: str = "fork",
    command: Sequence[str] = FRESH,
) -> Peer:
    """Start ``role(link, *args)`` in a process of its own.

    ``fork`` takes any callable and any arguments; ``spawn`` takes what pickle takes, and runs
    ``command`` (an interpreter with options, also behind ``private_shm(...)``). Start peers from
    the main thread: they are killed when the thread that started them ends.
    """
    return Peer(role, args, method, command)


def dismiss() -> None:
    """Kill and reap all peers that still live, and reap what they left behind."""
    for peer in list(_live):
        peer.kill()
    reap(children_of(os.getpid()))


def reap(pids: Iterable[int], kill: bool = False) -> None:
    """Reap the processes that have ended; with ``kill``, kill and reap all of them."""
    for pid in pids:
        if kill:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0 if kill else os.WNOHANG)


def _run_child(
    link: Link, role: Callable[..., Any], args: tuple[Any, ...], method: str, command: Sequence[str]
) -> None:
    code = 70
    try:
        die_with_parent()
        for other in _live:  # otherwise they would not notice the end of the test
            other._link.close()
        _live.clear()
        if method == "fork":
            code = play(link, role, args)
        else:
            os.set_inheritable(link.descriptor(), True)
            argv = [*command, "-c", _ENTER, str(link.descriptor()), str(_ROOT)]
            os.execvp(argv[0], argv)
    finally:
        os._exit(code)


_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def play(link: Link, role: Callable[..., Any], args: tuple[Any, ...]) -> int:
    """Play the role, report its value or error over the link, and return the exit status."""
    try:
        link.report("value", role(link, *args))
    except BaseException as error:
        text = traceback.format_exc()
        try:
            link.report("error", error, text)
        except Exception:  # the error cannot be pickled: send only its text
            link.report("error", None, text)
        return 1
    return 0


def main() -> int:
    """In a fresh interpreter: take role and arguments from the inherited link, and play."""
    return play_from(int(sys.argv[1]))


def play_from(descriptor: int) -> int:
    """Take role and arguments from that link, and play."""
    link = Link.from_descriptor(descriptor)
    role, args = link.hear()
    die_with_parent()
    return play(link, role, args)


def serve(link: Link, target: object, greeting: object = None) -> None:
    """The role: send ``greeting``, then make the requested calls until told to stop."""
    link.tell(greeting)
    while (request := link.hear(timeout=10 * PATIENCE)) is not None:
        call, args, kwargs = request
        link.tell("begun")
        value, error = None, None
        try:
            if isinstance(call, str):
                value = getattr(target, call)(*args, **kwargs)
            else:
                value = call(target, *args, **kwargs)
        except BaseException as problem:
            error = problem.with_traceback(None)
        link.tell((value, error, time.monotonic()))
        del value, error, request, call, args, kwargs


class Remote:
    """The test's side of ``serve``; ``greeting`` is the role's first word."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.pid = peer.pid
        self.greeting = peer.hear()
        self.ended = float("nan")

    def begin(self, call: str | Callable[..., Any], *args: Any, **kwargs: Any) -> "Remote":
        """Start a method (or ``call(target, ...)``); returns when the call has begun."""
        self.peer.tell((call, args, kwargs))
        assert self.peer.hear() == "begun"
        return self

    def until_blocked(self) -> "Remote":
        """Return when the process sleeps in the call that has begun."""
        self.peer.until_asleep()
        return self

    def outcome(self, timeout: float = PATIENCE) -> Any:
        """The value of the call or its exception; the time of its end is in ``ended``."""
        value, error, self.ended = self.peer.hear(timeout)
        if error is not None:
            raise error
        return value

    def call(self, call: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin a call and wait for its outcome."""
        return self.begin(call, *args, **kwargs).outcome()

    def leave(self) -> None:
        """Let the role end: the object is dropped and the process exits."""
        self.peer.tell(None)
        self.peer.result()
