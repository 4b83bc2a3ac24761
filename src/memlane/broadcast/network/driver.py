"""The base of both remote ends: one call at a time, one background thread, one wait loop.

A libzmq socket may change threads, but only one thread may use it at a time: `lock` guards the
sockets and all state. The end's own thread (`_serve`) answers the peer between the application's
calls; during a call, the calling thread does. No thread waits with the lock held: a wait polls the
descriptors that libzmq signals through.

The rules for calls are those of `native/bindings/ends/end.hpp`: a second call raises
`ConcurrentUse`, `close()` may come from any thread and from a signal handler, a forked child may
only `close()`.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import resource
import select
import threading
import time
import traceback
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import zmq
import zmq.utils.garbage

from memlane._base.deadline import NEVER, Deadline
from memlane._base.descriptors import new_event
from memlane._base.diagnosis import Stall
from memlane._base.guard import Guard
from memlane._base.lifetime import is_left_behind, note_exit, start_thread
from memlane._locks import Lock
from memlane._native import fork_generation
from memlane._net.contexts import new_context
from memlane.broadcast.watching import ShownWatch
from memlane.errors import (
    Cancelled,
    Closed,
    ConcurrentUse,
    MemlaneError,
    TimedOut,
    WrongProcess,
    system_fault,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memlane._base.blame import Activity
    from memlane._native import RingSegment
    from memlane._net.sockets import Transport
    from memlane.broadcast.network.peer_table import PeerTable

    T = TypeVar("T")

logger = logging.getLogger("memlane")

SLICE = 0.1
"""Longest sleep within a call, in seconds; signals and `cancel` are checked in between."""


class Asked(Protocol):
    """The type of `cancel`: a threading.Event or a look-alike."""

    def is_set(self) -> bool: ...


class WakeUp:
    """An eventfd by which one thread of an end wakes another; used with the end's lock held."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.is_set = False

    def set(self) -> None:
        self.is_set = True
        os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        if self.is_set:
            with suppress(BlockingIOError):
                os.eventfd_read(self.descriptor)
            self.is_set = False


class NetworkEnd(ABC):
    """An end with a transport of its own.

    Attributes:
        guard: held around every call; admits one at a time.
        lock: held around every use of the transport and the session; see `locked`.
        generation: the process that opened this end, as `fork_generation` numbers it.
        shown: what its descriptor shows; None: nobody has asked for one.
        ran_at: when this process last ran, for clocks that stand while it is stopped.
        table: what observers see of it.
    """

    transport: Transport | None = None
    segment: RingSegment | None = None  # of a writer's readers on its host
    table: PeerTable
    bound: float  # seconds after which an unreachable peer counts as dead

    def __init__(self, name: str, table: PeerTable) -> None:
        self.table = table
        self.generation = fork_generation()
        self.lock = Lock()
        self.guard = Guard(self._begin_call, self._end_call)
        self.is_closing = self._announce = self._closed = self._is_freed = False
        self._deadline = NEVER  # of close()
        self._ends_itself = False  # the thread closes this end, because nobody else can
        self._was_closed_here = False  # inside of `locked`
        self._ender = 0  # the thread that ends this end
        self._broken: BaseException | None = None  # what ended the thread
        self._has_warned = False  # that no descriptor can be opened
        self._events: list[int] = []
        self._context = new_context()
        self._closing_event = self._event()
        self._waker = WakeUp(self._event())
        self.shown: ShownWatch | None = None
        self._thread = threading.Thread(target=self._run, name=f"memlane-{name}", daemon=True)
        self.ran_at = time.monotonic()
        self._call_poller: select.poll
        _ends.add(self)

    @property
    def label(self) -> str:
        """The queue's name."""
        return self.table.label

    @label.setter
    def label(self, label: str) -> None:
        with self.locked():
            self.table.label = label

    def note_work(self, requests: bytes) -> None:
        """Shows observers of a ring whose messages these answer. Raises Closed."""
        self.check()
        if self.segment is not None:
            self.segment.note_work(requests)

    # Resources --------------------------------------------------------------------------------

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Wraps the rest of a constructor: if it fails, everything is freed."""
        try:
            yield
        except BaseException as error:
            self.is_closing = True
            os.eventfd_write(self._closing_event, 1)
            if self._thread.is_alive():
                self._thread.join()
            # A handler may have kept the context from knowing of a socket, which would never end.
            traceback.clear_frames(error.__traceback__)
            self._free()
            is_raw = isinstance(error, OSError) and not isinstance(error, MemlaneError)
            if isinstance(error, zmq.ZMQError) or is_raw:
                number = getattr(error, "errno", None) or errno.EIO
                raise system_fault(number, "cannot open a socket") from None
            raise

    def _start_thread(self) -> None:
        start_thread(self._thread)

    def _event(self) -> int:
        """A descriptor that one thread can wake another with."""
        self._events.append(new_event())
        return self._events[-1]

    def _note_time(self) -> None:
        """With the lock held, before any clock is judged, as of then. Clocks of lost peers stand
        while this process is stopped, or can open no descriptor: nobody could come back."""
        last, self.ran_at = self.ran_at, time.monotonic()
        gap = self.ran_at - last
        if gap > self.bound / 2 or (self._is_doubting() and not self._can_open()):
            self._delay_clocks(gap, self.ran_at)

    @abstractmethod
    def _is_doubting(self) -> bool:
        """Returns whether the clock of a lost peer runs; it is looked at often then."""

    @abstractmethod
    def _delay_clocks(self, seconds: float, now: float) -> None:
        """Sets the clocks of lost peers back."""

    def _can_open(self) -> bool:
        """Returns whether this process can open a descriptor. While it cannot, no lost connection
        can be restored, and that is no peer's fault."""
        try:
            os.close(os.dup(self._closing_event))
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
                logger.warning(
                    "%s: lost connections of this queue cannot be restored, and peers without one "
                    "are waited for; close descriptors or raise the limit of %d (`ulimit -n`)",
                    error.strerror,
                    limit,
                )
            return False
        return True

    def _free(self, linger: float = 0.0) -> None:
        """Closes everything still open; unsent frames have `linger` seconds to go out. What a
        signal handler interrupts can be called again."""
        with self.lock:  # another thread may be inside of `locked`
            self._closed = True
        if self.transport is not None:
            self.transport.close()
        self._context.destroy(linger=int(1000 * linger))
        if self.transport is not None:
            self.transport.descriptors.forget_all()
        with self.lock:  # another thread may be about to write to one
            self.table.close()
            while self._events:
                os.close(self._events.pop())
        self._is_freed = True

    # Calls ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if this end is closed, its thread failed, or a parent process opened it."""
        if self.generation != fork_generation():
            raise WrongProcess(
                "this object was opened in the parent process, before the fork; only close() may "
                "be called here. Create or attach a new one in the child"
            )
        if is_left_behind():  # the exit closes its peers, too, which is no death to report
            raise SystemExit
        if self.is_closing or self._closed:
            raise Closed("this queue is closed")
        if self._broken is not None:
            raise MemlaneError(
                f"internal error in memlane's network thread; please report it: {self._broken!r}"
            ) from self._broken

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Wraps an operation that may run beside a call. If a signal handler closes the end in
        the middle of it, the end is closed once the lock is free. Yields whether the operation may
        send and receive: not in a signal handler that has interrupted this thread doing so."""
        is_free = not self.lock._is_owned()  # type: ignore[attr-defined]
        self.check()  # before: in a forked child, the lock may be a thread's that is not there
        try:
            with self.lock:
                self.check()
                yield is_free
        finally:
            if self._was_closed_here:
                self._close()

    def _begin_call(self) -> None:
        """Runs before each call."""
        self.check()
        if self.lock._is_owned():  # type: ignore[attr-defined]
            raise ConcurrentUse("a signal handler may not use a queue whose call it interrupts")

    def _end_call(self) -> None:
        """Runs after each call: finishes closing the end if it was closed meanwhile."""
        if self.is_closing and self.generation == fork_generation():
            self._finish()

    def close(self, timeout: float | None = None) -> None:
        """Closes this end and tells the peers."""
        deadline = Deadline(timeout)
        if not self.is_closing:
            self._deadline, self._announce = deadline, True
        self._close()

    def abandon(self) -> None:
        """Frees everything and tells nobody."""
        self._close()

    def _close(self) -> None:
        if self._is_freed or self.generation != fork_generation():
            self._closed = True
            return
        if not self.is_closing:  # or another thread may have closed that descriptor by now
            os.eventfd_write(self._closing_event, 1)
            self.is_closing = True
            if self.shown is not None:
                self.shown.end()
        me = threading.get_ident()
        if me in (self.guard.thread, self._ender):
            return  # in a signal handler: the interrupted call closes it
        if me == self._thread.ident:
            self._ends_itself = True  # in a finalizer: nothing else refers to this end any more
            return
        if self.lock._is_owned():  # type: ignore[attr-defined]
            self._was_closed_here = True
            return
        # At interpreter exit, another thread may be in a call that never returns.
        self.guard.finish(None if self._announce else 1.0)

    def _finish(self) -> None:
        """Ends the thread and frees everything. No call may be in progress."""
        if self._is_freed:
            return
        self._ender = threading.get_ident()
        try:
            if self._thread.is_alive() and self._thread is not threading.current_thread():
                self._thread.join()
            linger, must_drain = 0.0, self._announce and not self._closed
            self._closed = True
            try:
                if must_drain:
                    linger = self._drain()
            finally:
                self._free(linger)
        finally:
            self._ender = 0

    @abstractmethod
    def _drain(self) -> float:
        """Tells the peers, once the thread and all calls have ended; returns `_free`'s `linger`."""

    # Waiting ----------------------------------------------------------------------------------

    def _poller(self, *descriptors: int) -> select.poll:
        poller = select.poll()
        for descriptor in (self._closing_event, *descriptors):
            poller.register(descriptor, select.POLLIN)
        return poller

    @staticmethod
    def _sleep(poller: select.poll, seconds: float | None) -> None:
        """Sleeps until a descriptor is readable. Rounds up, or a wait would end before its
        deadline; an hour at most, because an int of milliseconds overflows after 24 days."""
        poller.poll(None if seconds is None else int(min(seconds, 3600.0) * 1000) + 1)

    def wait(
        self,
        ready: Callable[[], T | None],
        deadline: Deadline,
        who: Callable[[], str],
        cancel: Asked | None = None,
        stall_line: Callable[[float], str | None] | None = None,
        poller: select.poll | None = None,
    ) -> T:
        """Ticks with the lock held until `ready` returns something other than None; returns that.

        A result takes precedence over `cancel`, and `cancel` over the deadline, whose error names
        `who` was waited for. A long wait logs what `stall_line` returns.
        """
        stall = None if stall_line is None else Stall(stall_line)
        while True:
            with self.lock:
                self._note_time()
                found = ready()
                if found is not None:
                    return found
                due = self._tick()
                found = ready()
                if found is not None:
                    return found
                if stall is not None:
                    stall.report()
            if cancel is not None and cancel.is_set():
                raise Cancelled
            now = time.monotonic()
            if now >= deadline.end:
                timeout = deadline.timeout
                with self.lock:
                    raise timed_out(timeout, who(), self.table.label)
            end = deadline.end if due is None else min(due, deadline.end)
            self._sleep(poller or self._call_poller, max(0.0, min(SLICE, end - now)))

    @abstractmethod
    def _tick(self) -> float | None:
        """Receives, and does what is due, with the lock held; returns when more is due."""

    @abstractmethod
    def _show(self, now: float) -> None:
        """Updates what observers see, if that is due; with the lock held."""

    def show_wait(self, activity: Activity) -> None:
        """Shows observers that a call or a coroutine waits, or does so no longer."""
        if activity != "elsewhere":
            self.table.begin(activity)
        elif self.table.end():
            with self.lock:
                self._show(time.monotonic())

    # Watching ---------------------------------------------------------------------------------

    def watched(self) -> ShownWatch:
        """Creates what the descriptor shows, if nobody has asked for it before."""
        if self.shown is None:
            with self.locked():
                self.shown = self.shown or ShownWatch()
                if self.is_closing:  # since
                    self.shown.end()
        return self.shown

    def wake(self, sleeper: WakeUp) -> None:
        with self.lock:
            if not self._closed:  # or another file might have that descriptor by now
                sleeper.set()

    def wake_thread(self) -> None:
        """Makes the thread look again."""
        self.wake(self._waker)

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self.is_closing:
                self._serve()
        except BaseException as error:  # it would go unnoticed otherwise
            self._broken = error
            if self.shown is not None:
                self.shown.end()
            logger.exception("memlane's network thread failed")
        # If a call or another thread holds the guard, it closes this end.
        if self._ends_itself:
            self.guard.finish(0)

    @abstractmethod
    def _serve(self) -> None:
        """Does what is due and sleeps until something is."""


def timed_out(timeout: float | None, who: str, label: str = "") -> TimedOut:
    """The error of a call on the queue that people call `label`."""
    queue = f"queue {label}: " if label else ""
    return TimedOut(f"{queue}timed out after {timeout} s waiting for {who}", timeout)


_ends: weakref.WeakSet[Any] = weakref.WeakSet()


def _at_exit() -> None:
    """Registered after the exit handler of pyzmq's collector, so it runs before that: the collector
    must still run when libzmq returns the memory it was lent."""
    note_exit()
    for end in list(_ends):
        end.abandon()


atexit.register(_at_exit)
