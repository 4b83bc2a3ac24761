"""Starts memlane's own threads, with an error that says what the system lacks."""

from __future__ import annotations

import errno
import os
import threading

from memlane.errors import system_fault


def start(thread: threading.Thread) -> None:
    """Starts the thread.

    Raises:
        SystemFault: with EAGAIN, if the system has no more threads for this user.
    """
    try:
        thread.start()
    except RuntimeError as error:
        if "can't start new thread" not in str(error):  # but at exit, or another thread's error
            raise
        raise system_fault(errno.EAGAIN, f"cannot start the thread {thread.name!r}") from None


def need(count: int) -> None:
    """Raises SystemFault unless `count` more threads may run at once."""
    running = threading.Lock()
    probes: list[threading.Thread] = []

    def end_when_it_is_over() -> None:
        with running:
            pass

    try:
        with running:  # released however the block ends, even by a signal handler that raises
            for number in range(count):
                probe = threading.Thread(
                    target=end_when_it_is_over, name=f"memlane-{number}", daemon=True
                )
                start(probe)
                probes.append(probe)
    finally:
        for probe in probes:
            probe.join()
            _until_gone(probe)


def _until_gone(thread: threading.Thread) -> None:
    """Waits until the kernel has ended the thread, a few microseconds after Python reports it."""
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        os.sched_yield()
