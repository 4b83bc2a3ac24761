"""Python stacks of other processes, by py-spy run as a command.

py-spy pauses the process for milliseconds, so only suspects are asked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memlane._base import processes

_TIMEOUT = 5.0
# Of collectives, and of waits for a device, which may run one.
_PEERS = ("torch/distributed/", "device_communicators/", "parallel_state.py")
_PEER_CALLS = ("synchronize", "barrier", "all_reduce", "all_gather", "reduce_scatter")
# Where the innermost call of a thread is that waits for work: of the standard library, of event
# loops and sockets, of memlane, and of the rings that engines have.
_RESTING = re.compile(
    r"(threading|queue|selectors|socket|subprocess|contextlib)\.py$|(zmq|uvloop|memlane)/"
    r"|asyncio/(base_events|runners)\.py$|concurrent/futures/thread\.py$"
    r"|multiprocessing/(connection|queues|resource_tracker|forkserver|popen_fork)\.py$"
    r"|(.*/)?shm_broadcast\.py$"
)
_AT_ONCE = 64  # py-spy's at the same time
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
_refusal = ""  # see take_no_stacks


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
    """A thread's calls, the innermost first; `id` is the kernel's, 0 if unknown."""

    name: str
    is_main: bool
    frames: tuple[Frame, ...]
    id: int = 0

    @property
    def is_at_rest(self) -> bool:
        """True if it waits for work: for a queue, an event, a socket, a child."""
        place = self.resting_in
        if place is None or place.file.startswith("concurrent/futures/_base"):
            return False
        innermost = self._python[0]
        return innermost.file != "socket.py" or "accept" in innermost.name

    @property
    def resting_in(self) -> Frame | None:
        """The call from which such a wait was entered; None if its innermost call is no wait."""
        calls = self._python
        if not calls or not _RESTING.match(calls[0].file):
            return None
        return next((call for call in calls if not _RESTING.match(call.file)), calls[-1])

    @property
    def _python(self) -> list[Frame]:
        """Without the frames of C and C++, which stand between."""
        return [frame for frame in self.frames if frame.file.endswith((".py", ">"))]


@dataclass(frozen=True)
class Stack:
    """The Python stacks of a process, its main thread's first."""

    threads: tuple[Thread, ...]

    @property
    def main(self) -> tuple[Frame, ...]:
        """The main thread's calls, the innermost first; of a forked worker, its parent's last."""
        return self.threads[0].frames if self.threads else ()

    @property
    def waits_for_peers(self) -> bool:
        """True if the main thread is in a call that returns when its peers do the same."""
        return any(
            any(part in frame.file for part in _PEERS)
            or frame.name.rpartition(".")[2] in _PEER_CALLS
            for frame in self.main
        )


@dataclass(frozen=True)
class NoStack:
    """The reason why there is none, in a few words: the missing right, program, or process."""

    reason: str


def take_no_stacks(reason: str) -> None:
    """From now on this process starts no program that looks at others."""
    global _refusal
    _refusal = reason


def stacks_of(
    processes_of: Mapping[int, int], *, native: bool = False, timeout: float = _TIMEOUT
) -> dict[int, Stack | NoStack]:
    """The stacks of several processes, all at once: `timeout` is for all together.

    Args:
        processes_of: the clock tick at which each was started, by pid: another process that has its
            number by now is left alone.
        native: with the frames of C and C++, which takes seconds.
    """
    if _refusal:
        return dict.fromkeys(processes_of, NoStack(_refusal))
    if not processes_of:
        return {}
    until = time.monotonic() + timeout
    with ThreadPoolExecutor(min(len(processes_of), _AT_ONCE)) as pool:
        made = {
            pid: pool.submit(_stack_by, pid, started, native, until)
            for pid, started in processes_of.items()
        }
    return {pid: each.result() for pid, each in made.items()}


def _stack_by(pid: int, started: int, native: bool, until: float) -> Stack | NoStack:
    condition = processes.condition(pid, started)
    if condition is None:
        return NoStack("it has ended, or is not of this pid namespace")
    # What the kernel keeps from running cannot be paused; it is read as it stands.
    is_held = condition.state != "running" or condition.is_in_state_d
    return stack(
        pid, max(0.1, until - time.monotonic()), native=native and not is_held, pauses=not is_held
    )


def stack(
    pid: int, timeout: float = _TIMEOUT, *, native: bool = False, pauses: bool = True
) -> Stack | NoStack:
    """The stacks of a process now.

    Args:
        native: with the frames of C and C++.
        pauses: stops it for some milliseconds; else it is read while it runs.
    """
    program = _program()
    if program is None:
        return NoStack("py-spy is not installed; run: pip install '.[cli]' in memlane's checkout")
    command = [program, "dump", "--json", "--pid", str(pid)]
    if native:
        command.append("--native")
    if not pauses:
        command.append("--nonblocking")
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout)
    except subprocess.TimeoutExpired:
        return NoStack(f"py-spy did not answer within {timeout:.1f} s")
    except OSError as error:
        return NoStack(f"py-spy cannot be run: {error.strerror}")
    if done.returncode != 0:
        return NoStack(_reason(pid, done.stderr.decode(errors="replace")))
    try:
        return Stack(_threads(json.loads(done.stdout), pid))
    except (ValueError, KeyError, TypeError):
        return NoStack("py-spy's answer cannot be read")


def _program() -> str | None:
    """py-spy's program of this environment, else the one on the PATH."""
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
    said, _, _ = text.partition("Stack backtrace:")  # of py-spy itself
    causes = [line.strip() for line in said.splitlines() if line.strip()]
    return re.sub(r"^\d+: ", "", causes[-1]) if causes else "py-spy failed without a word"


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
            int(thread.get("os_thread_id") or 0),
        )
        for thread in answer
    ]
    return tuple(sorted(threads, key=lambda thread: not thread.is_main))
