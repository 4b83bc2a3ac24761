"""Ends the demo: normally, with a one-line error, or by a signal. All exits pass through here.

A signal must not interrupt the scheduler between starting a worker and recording it, or while a
view has hidden the cursor but not yet arranged to show it again. So the signals that end the demo
are deferred from the program's first line to its last, except in `with interruptible():` blocks,
which surround everything that may take long. There the signal raises `Ended`, and the enclosing
`with` blocks close what they hold.

Uninterruptible code may hang, for example on a terminal that nobody reads. `STUCK_SECONDS` after
the signal the demo exits as if killed: its workers notice and leave; the last unlinks all names.

This module imports nothing slow: it runs before numpy and memlane are imported.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
STUCK_SECONDS = 20.0
"""Far more than killing stopped workers takes, even on a busy machine."""


class Ended(BaseException):
    """A signal ends the demo. Not an `Exception`, so that no error handler catches it."""


class _State:
    """The state of the signal handlers; like them, there is one per process."""

    came: int | None = None
    """The first signal received."""
    is_interruptible = False


def run(module: str) -> NoReturn:
    """Run `main` of a module of this package, and exit with its code, or 128 + n after a signal.

    A shell reports a program killed by signal n as 128 + n, too. The demo cannot let the signal
    kill it: the first process of a container is not killed by signals that it has no handler for.

    You may start it with these signals blocked, because one that arrives while the interpreter
    starts prints a traceback: `env --block-signal=INT,TERM,HUP,QUIT python -m engine`.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as set by nohup, or a shell's `&`
            signal.signal(number, _handle)
    signal.signal(signal.SIGALRM, _break_off)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    code: str | int | None = 0
    try:
        if sys.stdout is not None:
            sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
        code = import_module(f".{module}", __package__).main()
    except Ended:
        pass
    except SystemExit as leave:  # raised by argparse
        code = leave.code
    except OSError as error:
        code = complain(error)
    _give_up_output()
    sys.exit(code if _State.came is None else 128 + _State.came)


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside the block a signal that ends the demo raises `Ended`; at once if it came before."""
    _State.is_interruptible = True
    try:
        check()
        yield
    finally:
        _State.is_interruptible = False
    check()


def check() -> None:
    """Raise `Ended` if a signal came; an `Ended` raised in a finalizer, for example, was lost."""
    if _State.came is not None:
        _State.is_interruptible = False
        raise Ended


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Processes started in the block have these signals blocked from the beginning.

    A terminal sends Ctrl-C to all processes. But workers end when the scheduler shuts them down or
    dies; until then they work, or import modules, and an interrupted import prints a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def complain(error: Exception) -> int:
    """Print an error in one line, unless a signal ends the demo; returns the exit code."""
    if _State.came is None:
        say(" ".join(str(error).split()) or f"{type(error).__name__}")
    return 1


def say(text: str) -> None:
    """Write one line to stderr, if it can be written to."""
    with suppress(OSError):
        if sys.stderr is not None:
            print(f"engine: {text}", file=sys.stderr, flush=True)


def _handle(number: int, _frame: FrameType | None) -> None:
    if _State.came is None:
        _State.came = number
        signal.setitimer(signal.ITIMER_REAL, STUCK_SECONDS)
    if _State.is_interruptible:
        _State.is_interruptible = False
        raise Ended


def _break_off(_number: int, _frame: FrameType | None) -> None:
    if _State.came is not None:
        os._exit(128 + _State.came)


def _give_up_output() -> None:
    """Flush stdout, or discard it: the interpreter's own flush would print an error of its own."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
