"""Threads of memlane's own: started, or an error that says what the system lacks."""

from __future__ import annotations

import errno
import os
import sys
import threading

from memlane.errors import system_fault


def start(thread: threading.Thread) -> None:
    """Start the thread.

    Raises:
        SystemFault: with EAGAIN, if the system has no more threads for this user.
    """
    try:
        thread.start()
    except RuntimeError:
        if sys.is_finalizing():
            raise
        raise system_fault(errno.EAGAIN, f"cannot start the thread {thread.name!r}") from None


def need(count: int) -> None:
    """Raise SystemFault unless so many threads more may run at once."""
    over = threading.Event()
    probes: list[threading.Thread] = []
    try:
        for number in range(count):
            probe = threading.Thread(target=over.wait, name=f"memlane-{number}", daemon=True)
            start(probe)
            probes.append(probe)
    finally:
        over.set()
        for probe in probes:
            probe.join()
            _until_gone(probe)


def _until_gone(thread: threading.Thread) -> None:
    """Python has seen its end; until the kernel has, microseconds later, it counts as a thread."""
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        os.sched_yield()
