"""How things end: steps undone when a later one fails, finalizers that can be repeated, and what is
abandoned at the interpreter's exit. And how threads begin, with an error that says what is lacking.

`weakref.finalize` alone may run too late at exit: multiprocessing registers the function that joins
its children when it first starts one, and `atexit` runs functions last in, first out. The join
never returns for a child that waits for a queue of this process.
"""

from __future__ import annotations

import atexit
import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from memlane.errors import system_fault


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises anything; at once, not when the traceback is dropped."""
    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()


def finish(finalizer: weakref.finalize[..., Any]) -> None:
    """Calls a finalizer, which must be idempotent. Unlike `finalizer()`, this can be repeated if a
    signal handler raised in it."""
    held = finalizer.peek()
    if held is not None:
        _, release, args, _ = held
        release(*args)
        finalizer.detach()


# Exit ---------------------------------------------------------------------------------------------

_finalizers: weakref.WeakKeyDictionary[object, weakref.finalize[[], Any]] = (
    weakref.WeakKeyDictionary()
)


def abandoned_at_exit(owner: object, abandon: Callable[[], None]) -> weakref.finalize[[], Any]:
    """Calls `abandon` when `owner` is collected, or at exit."""
    with undone_by(abandon):  # a signal handler may raise, and the first import takes long
        _come_before_multiprocessing()
        finalizer = weakref.finalize(owner, abandon)
        _finalizers[owner] = finalizer
    return finalizer


def _come_before_multiprocessing() -> None:
    if not _finalizers:
        import multiprocessing.util  # noqa: F401 - registers its function now, before ours

        atexit.unregister(_abandon_all)
        atexit.register(_abandon_all)


def _abandon_all() -> None:
    note_exit()
    for finalizer in list(_finalizers.values()):
        finalizer()


_is_exiting = False


def note_exit() -> None:
    """The interpreter exits: from now on ends are abandoned, whoever is in a call on them."""
    global _is_exiting
    _is_exiting = True


def is_left_behind() -> bool:
    """Whether the interpreter exits, and this is a daemon thread of the application. Its queues are
    closed under it, which is no error to report: SystemExit ends it without a word."""
    if not _is_exiting:
        return False
    thread = threading.current_thread()
    return thread.daemon and not thread.name.startswith("memlane-")


# Threads ------------------------------------------------------------------------------------------


def start_thread(thread: threading.Thread) -> None:
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


def need_threads(count: int) -> None:
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
                start_thread(probe)
                probes.append(probe)
    finally:
        for probe in probes:
            probe.join()
            _until_gone(probe)


def _until_gone(thread: threading.Thread) -> None:
    """Waits until the kernel has ended the thread, a few microseconds after Python reports it."""
    while os.path.exists(f"/proc/self/task/{thread.native_id}"):
        os.sched_yield()
