"""The demo as a stranger starts it: with a pipe for its output, or with a terminal."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.harness import PATIENCE

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPTS = [b"2 + 2 =", "Grüße aus München".encode(), b"E", b"To be, or not to be:"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "engine", *arguments]


def environment(*first: Path, **more: str) -> dict[str, str]:
    """Ours, with the examples (behind the folders `first`) to be imported from."""
    paths = [*map(str, first), str(EXAMPLES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **more}


def run(
    *arguments: str, first: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Modules are looked for in `first` first."""
    env = environment(*([first] if first else []), **more)
    return subprocess.run(command(*arguments), env=env, capture_output=True, text=True, timeout=120)


def write_prompts(folder: Path, prompts: list[bytes]) -> str:
    path = folder / "prompts.txt"
    path.write_bytes(b"\n".join(prompts))
    return str(path)


class Terminal:
    """A terminal of 80 columns on which the demo runs; `shown` is all that came, codes included."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.shown = ""
        self._descriptor = descriptor

    @property
    def pids(self) -> list[int]:
        """The workers', by rank, once they are ready."""
        ready = re.search(r"ready \(pids ([\d, ]+);", self.shown)
        assert ready is not None, self.shown
        return [int(pid) for pid in ready[1].split(",")]

    def until_shown(self, pattern: str) -> str:
        """Read on until something new matches, and return that."""
        seen = len(self.shown)
        deadline = time.monotonic() + PATIENCE
        while (match := re.compile(pattern).search(self.shown, seen)) is None:
            assert self._read(deadline), f"it ended without {pattern!r}:\n{self.shown}"
        return match[0]

    def until_end(self) -> int:
        """Read everything; the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE)

    def _read(self, deadline: float) -> bool:
        left = max(0.0, deadline - time.monotonic())
        assert select.select([self._descriptor], [], [], left)[0], f"silent after:\n{self.shown}"
        try:
            data = os.read(self._descriptor, 1 << 16)
        except OSError:  # EIO: nobody has the other side open any more
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@contextmanager
def terminal(*arguments: str, env: dict[str, str] | None = None) -> Iterator[Terminal]:
    """The demo with a terminal for stdout and stderr; it is killed at the end of the block."""
    ours, theirs = os.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        env = {**(environment() if env is None else env), "TERM": "xterm-256color"}
        process = subprocess.Popen(command(*arguments), env=env, stdout=theirs, stderr=theirs)
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    with process:
        try:
            yield Terminal(process, ours)
        finally:
            process.kill()
            os.close(ours)
