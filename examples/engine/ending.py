"""How the demo ends: by itself, by an error that is one line, or by a signal. The one way out.

A signal must not interrupt a scheduler between starting a worker and noting it, or while a view has
hidden the cursor and not yet promised to show it again. So the signals that end the demo wait, from
the program's first line to its last, except in `with interruptible():` blocks, which surround
everything that may take long. There the signal raises `Ended`, and the `with` blocks further out
close what they hold.

What is not interruptible may hang, on a terminal that nobody reads. After `STUCK_SECONDS` the demo
leaves as a killed one would: its workers see that and go, and the last removes what has a name.

Nothing slow is imported here: this runs before numpy and memlane are imported.
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
"""Far more than it takes to see stopped workers off, on a busy machine, too."""


class Ended(BaseException):
    """A signal ends the demo; no `Exception`, so that nothing on the way takes it for an error."""


class _State:
    """What the handler knows; a process has one set of handlers, and so one of these."""

    came: int | None = None
    """The first signal that came."""
    is_interruptible = False


def run(module: str) -> NoReturn:
    """Run `main` of a module of this package, and exit with its code, or 128 + n after a signal.

    So does a shell tell of a program that a signal has killed. This one could not leave that to the
    system: as the first process of a container it is not killed by what it has no handler for.

    Who starts it may block the signals until here, for the interpreter's own start is interrupted
    with a traceback: `env --block-signal=INT,TERM,HUP,QUIT python -m engine`.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup says so, or a shell's `&`
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
    except SystemExit as leave:  # so argparse ends it
        code = leave.code
    except OSError as error:
        code = complain(error)
    _give_up_output()
    sys.exit(code if _State.came is None else 128 + _State.came)


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block a signal that ends the demo raises `Ended`, at once if it came before."""
    _State.is_interruptible = True
    try:
        check()
        yield
    finally:
        _State.is_interruptible = False
    check()


def check() -> None:
    """Raise `Ended` if a signal came. What was raised in a finalizer, for one, has got lost."""
    if _State.came is not None:
        _State.is_interruptible = False
        raise Ended


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Start processes in the block: those signals will be blocked in them from the beginning.

    A terminal sends Ctrl-C to all. But workers end when the scheduler lets them go, or dies; until
    then they have work to do, or imports, of which an interrupted one would print a traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def complain(error: Exception) -> int:
    """Say in one line what went wrong, and return the exit code; nothing if a signal ends us."""
    if _State.came is None:
        say(" ".join(str(error).split()) or f"{type(error).__name__}")
    return 1


def say(text: str) -> None:
    """Write one line to stderr, if there is somebody to read it."""
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
    """Leave nothing to the interpreter's own flush, which complains in words of its own."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
