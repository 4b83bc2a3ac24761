"""Python stacks of other processes, by py-spy run as a command.

py-spy pauses the process for milliseconds, so only suspects are asked.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlane._base import processes

_TIMEOUT = 5.0
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


@dataclass(frozen=True)
class Frame:
    """One call: the function's qualified name, its file and the line that it is at."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Thread:
    """A thread's calls, the innermost first."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True)
class Stack:
    """The Python stacks of a process, its main thread's first."""

    threads: tuple[Thread, ...]

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's calls, the innermost first; of a forked worker, its parent's last."""
        return self.threads[0].frames if self.threads else ()


@dataclass(frozen=True)
class NoStack:
    """Why there is none, in a few words: the missing right, program, or process."""

    reason: str


def stack(pid: int, timeout: float = _TIMEOUT) -> Stack | NoStack:
    """The stacks of a process now. A stopped one cannot be paused, so it is read as it stands."""
    program = _program()
    if program is None:
        return NoStack("py-spy is not installed: pip install 'memlane[cli]'")
    command = [program, "dump", "--json", "--pid", str(pid)]
    if processes.state(pid) == "stopped":
        command.append("--nonblocking")
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return NoStack(f"py-spy did not answer within {timeout:g} s")
    except OSError as error:
        return NoStack(f"py-spy cannot be run: {error.strerror}")
    if done.returncode != 0:
        return NoStack(_reason(pid, done.stderr.decode(errors="replace")))
    try:
        return Stack(_threads(json.loads(done.stdout), pid))
    except (ValueError, KeyError, TypeError):
        return NoStack("py-spy's answer cannot be read")


def _program() -> str | None:
    """That of this environment, else the one on the PATH."""
    own = os.path.join(sysconfig.get_path("scripts"), "py-spy")
    return own if os.access(own, os.X_OK) else shutil.which("py-spy")


def _reason(pid: int, text: str) -> str:
    if processes.state(pid) == "dead":
        return "it has ended"
    if "ermission" in text or "EPERM" in text or "not permitted" in text:
        scope = ""
        with suppress(OSError):
            scope = f" (kernel.yama.ptrace_scope is {_YAMA.read_text().strip()})"
        return f"no right to trace it: needs root or CAP_SYS_PTRACE{scope}"
    if "python" in text.lower() and ("find" in text or "version" in text):
        return "no Python process that py-spy can read"
    last = [line for line in text.strip().splitlines() if line.strip()]
    return last[-1].strip() if last else "py-spy failed without a word"


def _threads(answer: Sequence[dict[str, Any]], pid: int) -> tuple[Thread, ...]:
    threads = [
        Thread(
            str(thread.get("thread_name") or ""),
            thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread",
            tuple(
                Frame(
                    str(frame["name"]),
                    str(frame.get("short_filename") or frame.get("filename") or ""),
                    int(frame["line"]),
                )
                for frame in thread["frames"]
            ),
        )
        for thread in answer
    ]
    return tuple(sorted(threads, key=lambda thread: not thread.is_main))
