"""Orderly ends: steps undone when a later one fails, and what an object owns given back, however it
ends. And how threads begin, with an error that says what is lacking.

`weakref.finalize` alone may run too late at exit: multiprocessing registers the function that joins
its children when it first starts one, and `atexit` runs functions last in, first out. The join
never returns for a child that waits for a queue of this process.
"""

from __future__ import annotations

import _thread
import atexit
import errno
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType
from typing import Any, ClassVar, Self

from memlane._importing import fork_waits
from memlane._locks import Lock
from memlane._native import call_aside
from memlane.errors import InvalidType, system_fault


@contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises anything; at once, not when the traceback is dropped."""
    with ExitStack() as stack:
        stack.callback(undo)
        yield
        stack.pop_all()


# Owners -------------------------------------------------------------------------------------------


class Owned:
    """An object that owns memory, descriptors or threads.

    Closing it gives them back and tells the peers. The last reference, and the interpreter's exit,
    abandon them: that frees as much, but looks like a death to the peers.
    """

    _instead_of_pickling: ClassVar[str]
    _finalizer: weakref.finalize[[], Any] | None = None

    def _own(self, abandon: Callable[[], object]) -> None:
        """`abandon` must be idempotent, and not refer to this object."""
        with undone_by(abandon):  # a signal handler may raise, and the first import takes long
            _come_before_multiprocessing()
            self._finalizer = weakref.finalize(self, abandon)
            self._finalizer.atexit = False  # `_abandon_all` does it, before multiprocessing joins
            _owners[self] = None

    def _disown(self) -> None:
        """Everything was given back."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _abandon(self) -> None:
        # Unlike a call of the finalizer, this can be repeated if a signal handler raised in it.
        held = None if self._finalizer is None else self._finalizer.peek()
        if held is not None:
            held[1]()
            self._disown()

    def _check(self) -> None:
        """Raises unless it can be used: it is open, and in its own process."""
        raise NotImplementedError

    def _end_block(self, has_failed: bool) -> None:
        """Closes it, or abandons it if the block has failed."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._check()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end_block(kind is not None)

    def __reduce__(self) -> Any:
        name = type(self).__name__
        raise InvalidType(f"a {name} cannot be pickled or copied: {self._instead_of_pickling}")


_owners: weakref.WeakKeyDictionary[Owned, None] = weakref.WeakKeyDictionary()  # by age


def _come_before_multiprocessing() -> None:
    if not _owners:
        with fork_waits:
            import multiprocessing.util  # noqa: F401 - registers its function now, before ours

        atexit.unregister(_abandon_all)
        atexit.register(_abandon_all)


def _abandon_all() -> None:
    note_exit()
    with ExitStack() as stack:  # the newest first, and all, even if a signal handler raises in one
        for owner in list(_owners):
            stack.callback(owner._abandon)


_is_exiting = False


def note_exit() -> None:
    """The interpreter exits: from now on ends are abandoned, also those with a call under way."""
    global _is_exiting
    _is_exiting = True


def is_left_behind() -> bool:
    """Returns whether the interpreter exits, and this is a daemon thread of the application. Its
    queues are closed under it, which is no error to report: SystemExit ends it silently."""
    if not _is_exiting:
        return False
    thread = threading.current_thread()
    return thread.daemon and not thread.name.startswith("memlane-")


# Threads ------------------------------------------------------------------------------------------


def start_thread(thread: threading.Thread) -> None:
    """Starts the thread. If a signal handler raises meanwhile, it runs, or never will.

    Raises:
        SystemFault: with EAGAIN, if the system has no more threads for this user.
    """
    try:
        if not (_is_interruptible() and _starts_aside(thread)):
            thread.start()
    except RuntimeError as error:
        if "can't start new thread" not in str(error):  # but at exit, or another thread's error
            raise
        raise system_fault(errno.EAGAIN, f"cannot start the thread {thread.name!r}") from None


def _is_interruptible() -> bool:
    """Returns whether signal handlers may run in `Thread.start` here, which is not made for what
    they raise: it forgets the thread, or takes from it what it needs to begin."""
    return threading.get_ident() == threading.main_thread().ident


def _starts_aside(thread: threading.Thread) -> bool:
    """Starts it from a thread without handlers. False: it was not started."""
    lock: Any = getattr(threading, "_active_limbo_lock", None)
    is_held = lock is not None and lock._is_owned()  # this is a handler or a finalizer in `start`
    are_greenlets = not isinstance(_thread.start_new_thread, BuiltinFunctionType)  # of this thread
    if is_held or are_greenlets or sys.is_finalizing():
        return False
    try:
        return call_aside(thread.start, _thread.start_new_thread)
    except RuntimeError:  # there may be room for one
        return thread.is_alive()


def need_threads(count: int) -> None:
    """Raises SystemFault unless `count` more threads may run at once."""
    running = Lock()
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
        time.sleep(0)
