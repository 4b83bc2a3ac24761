"""Waits until a condition of a test is true, and looks at tasks from outside."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 180.0
"""Seconds after which a test gives up on something that should have happened long ago."""


UNHURRIED = {"MEMLANE_RINGBUFFER_WARNING_INTERVAL": "inf"}
"""Environment of a program whose stderr a test reads: waits of busy machines are not logged."""


def until(
    condition: Callable[[], object],
    what: str = "",
    timeout: float = PATIENCE,
    pause: float = 0.002,
) -> None:
    """Return as soon as ``condition()`` holds; fail with ``what`` after ``timeout``."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what or condition}")
        time.sleep(pause)


async def eventually(condition: Callable[[], object], what: str = "") -> None:
    """`until` for coroutines: the others of the loop run meanwhile."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {PATIENCE} s: {what or condition}")
        await asyncio.sleep(0.001)


def _state_and_ticks(task: int) -> tuple[str, int]:
    # The second field is the command in parentheses and may contain anything.
    fields = Path(f"/proc/{task}/stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[11]) + int(fields[12])


def asleep(task: int) -> bool:
    """Returns whether the process or thread sleeps in the kernel, seen several times in a row."""
    for _ in range(5):
        if _state_and_ticks(task)[0] != "S":
            return False
        time.sleep(0.002)
    return True


def until_asleep(task: int) -> None:
    """Return when the task has come to rest: it is blocked in whatever call it made last."""
    until(lambda: asleep(task), f"task {task} is blocked")


def until_at_rest(task: int) -> None:
    """Return when the task is blocked, or dead (and not yet reaped)."""
    until(lambda: _state_and_ticks(task)[0] == "Z" or asleep(task), f"task {task} is at rest")


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, as precise as the kernel counts it."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def idle_share(seconds: float = 1.0) -> float:
    """Returns how much of a processor this process uses while its main thread sleeps that long."""
    began, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return (time.process_time() - used) / (time.monotonic() - began)


def sleeps(pid: int) -> int:
    """Returns how often the threads of a process have given up the processor because they had to
    wait."""
    key = "\nvoluntary_ctxt_switches:"
    return sum(
        int((task / "status").read_text().partition(key)[2].split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    )
