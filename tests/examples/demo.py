"""Starts the demo as a user would, with a pipe or a terminal for its output."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support import PATIENCE, UNHURRIED

RUN = 2 * PATIENCE
"""Seconds after which a test gives up on a whole run of a program."""
EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [b"2 + 2 =", "Grüße aus München".encode(), b"E", b"To be, or not to be:"]


def command(*arguments: str, module: str = "engine") -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def environment(*first: Path, **more: str) -> dict[str, str]:
    """This process's environment, with the examples importable after the folders in `first`."""
    paths = [*map(str, first), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, paths))
    return {**os.environ, **UNHURRIED, "PYTHONPATH": path, **more}


def run(
    *arguments: str, first: Path | None = None, brief: bool = False, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs the demo, unless `brief` with all that it measures; `first` comes before its folder."""
    env = environment(*([first] if first else []), **more)
    whole = command(*arguments, *([] if brief else ["--verbose"]))
    return subprocess.run(whole, env=env, capture_output=True, text=True, timeout=RUN)


def complaints(stderr: str) -> list[str]:
    """All lines but what a busy machine may cause: a worker that takes its time to leave, and a
    disk that is too slow for all evicted blocks."""
    usual = ("engine: waiting for ", "a tier chain lost ")
    return [line for line in stderr.splitlines() if not line.startswith(usual)]


def write_prompts(folder: Path, prompts: list[bytes]) -> str:
    path = folder / "prompts.txt"
    path.write_bytes(b"\n".join(prompts))
    return str(path)


HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def without_codes(shown: str) -> str:
    """A terminal's output without the codes that move and paint."""
    return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)


class Terminal:
    """A terminal on which the demo runs; `shown` is all its output, codes included."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.shown = ""
        self._descriptor = descriptor

    def type(self, keys: bytes) -> None:
        """Presses keys: Ctrl-C is b"\\x03"."""
        os.write(self._descriptor, keys)

    def hang_up(self) -> None:
        """Closes the terminal."""
        os.close(self._descriptor)
        self._descriptor = -1

    @property
    def is_there(self) -> bool:
        return self._descriptor >= 0

    @property
    def is_cursor_hidden(self) -> bool:
        return self.shown.rfind(HIDE_CURSOR) > self.shown.rfind(SHOW_CURSOR)

    @property
    def pids(self) -> list[int]:
        """The workers' pids, by rank, once they are ready."""
        ready = re.search(r"ready \(pids ([\d, ]+);", self.shown)
        assert ready is not None, self.shown
        return [int(pid) for pid in ready[1].split(",")]

    def until_shown(self, pattern: str) -> str:
        """Reads until something new matches, and returns that."""
        seen = len(self.shown)
        deadline = time.monotonic() + PATIENCE
        while (match := re.compile(pattern).search(self.shown, seen)) is None:
            assert self._read_on(deadline), f"it ended without {pattern!r}:\n{self.shown}"
        return match[0]

    def until_end(self) -> int:
        """Reads everything; returns the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read_on(deadline):
            pass
        return self.process.wait(PATIENCE)

    def read(self, seconds: float) -> bool:
        """Reads what arrives within that time; False at the end of the output."""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # EIO: nobody has the other side open any more
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)

    def _read_on(self, deadline: float) -> bool:
        assert time.monotonic() < deadline, f"silent after:\n{self.shown}"
        return self.read(max(0.0, deadline - time.monotonic()))


def default_signals() -> None:
    """As a shell starts a foreground program; in the background it would ignore some."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


def _take_terminal() -> None:
    default_signals()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def terminal(
    *arguments: str,
    env: dict[str, str] | None = None,
    size: tuple[int, int] = (80, 40),
    module: str = "engine",
    term: str = "xterm-256color",
) -> Iterator[Terminal]:
    """The demo in the foreground of a terminal; it is killed at the end of the block."""
    ours, theirs = os.openpty()
    try:
        columns, rows = size
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        process = subprocess.Popen(
            command(*arguments, module=module),
            env={**(environment() if env is None else env), "TERM": term},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    with process:
        screen = Terminal(process, ours)
        try:
            yield screen
        finally:
            process.kill()
            if screen.is_there:
                screen.hang_up()
