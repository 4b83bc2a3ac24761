"""What both remote ends share: one call at a time, one thread that answers meanwhile, one wait.

Sockets of libzmq may change threads, but be used by one at a time: `lock` guards them and all
state. A thread of its own (`_serve`) answers the peer while the application does something else;
while the application is in a call, that call does it. Nobody waits with the lock held: a wait
polls the descriptors that libzmq signals through.

Which calls may come when is as in `native/bindings/end.hpp`: a second call raises `ConcurrentUse`,
`close()` may come from any thread and from a signal handler, a forked child may only `close()`.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import select
import threading
import time
import weakref
from abc import ABC, abstractmethod
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import zmq
import zmq.utils.garbage

from memlane import _threads
from memlane._contexts import new_context
from memlane._deadlines import deadline_of
from memlane._native import Turn, fork_generation
from memlane._stalls import Stall
from memlane.errors import (
    Cancelled,
    Closed,
    MemlaneError,
    TimedOut,
    WrongProcess,
    system_fault,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memlane._sockets import Transport

    T = TypeVar("T")

logger = logging.getLogger("memlane")

SLICE = 0.1
"""Seconds that one sleep lasts at most: signals and `cancel` are looked after in between."""


class Asked(Protocol):
    """A `cancel`: a threading.Event, or like one."""

    def is_set(self) -> bool: ...


class RemoteEnd(ABC):
    """An end with a transport of its own.

    Attributes:
        turn: `with` it around every call, of which there is one at a time.
        lock: `with` it around every use of the transport and of the session; see `locked`.
    """

    transport: Transport | None = None

    def __init__(self, name: str) -> None:
        self._generation = fork_generation()
        self.lock = threading.RLock()
        self.turn = Turn(self.check, self._end_call)
        self._closing = self._announce = self._closed = False
        self._deadline: float | None = None  # of the goodbye
        self._ends_itself = False  # the thread, because nobody else can
        self._was_closed_here = False  # inside of `locked`
        self._ender = 0  # the thread that ends this end
        self._broken: BaseException | None = None  # what ended the thread
        self._events: list[int] = []
        self._context = new_context()
        self._closing_event = self._event()
        self._thread = threading.Thread(target=self._run, name=f"memlane-{name}", daemon=True)
        self._served_at = 0.0
        self._call_poller: select.poll
        _ends.add(self)

    # What it has ------------------------------------------------------------------------------

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Around the rest of a construction: if that fails, nothing stays."""
        try:
            yield
        except BaseException as error:
            self._closing = True
            os.eventfd_write(self._closing_event, 1)
            if self._thread.is_alive():
                self._thread.join()
            self._free()
            if isinstance(error, zmq.ZMQError):
                raise system_fault(error.errno or errno.EIO, "cannot open a socket") from None
            raise

    def _start_thread(self) -> None:
        _threads.start(self._thread)

    def _event(self) -> int:
        """A descriptor that one thread can wake another with."""
        self._events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        return self._events[-1]

    def _free(self, linger: float = 0.0) -> None:
        """Closes everything that is still there; what was said goes out for so long."""
        self._closed = True
        if self.transport is not None:
            self.transport.close()
        self._context.destroy(linger=int(1000 * linger))
        if self.transport is not None:
            self.transport.descriptors.forget_all()
        with self.lock:  # somebody may be about to write to one
            while self._events:
                os.close(self._events.pop())

    # Calls ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises if this end is closed or a parent process's."""
        if self._generation != fork_generation():
            raise WrongProcess(
                "this object was opened by the process that forked this one; only close() may be "
                "called here. Make a new end in the child"
            )
        if self._closing or self._closed:
            raise Closed("this end is closed")
        if self._broken is not None:
            raise MemlaneError(
                f"the thread of this end failed; please report it: {self._broken!r}"
            ) from self._broken

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Around what is no call, and may come beside one. If a signal handler closes the end in
        it, nothing can end it before the lock is free."""
        try:
            with self.lock:
                self.check()
                yield
        finally:
            if self._was_closed_here:
                self._close()

    def _end_call(self) -> None:
        """After each call: ends the end itself if it was closed meanwhile."""
        if self._closing and self._generation == fork_generation():
            self._finish()

    def close(self, timeout: float | None = None) -> None:
        """Ends this end and says so to the peers."""
        deadline = deadline_of(timeout)
        if not self._closing:
            self._deadline, self._announce = deadline, True
        self._close()

    def abandon(self) -> None:
        """Frees everything and tells nobody."""
        self._close()

    def _close(self) -> None:
        if self._closed or self._generation != fork_generation():
            self._closed = True
            return
        self._closing = True
        with suppress(OSError):
            os.eventfd_write(self._closing_event, 1)
        me = threading.get_ident()
        if me in (self.turn.thread, self._ender):
            return  # in a signal handler: the call ends it
        if me == self._thread.ident:
            self._ends_itself = True  # in a finalizer: nobody else knows of this end any more
            return
        if self.lock._is_owned():  # type: ignore[attr-defined]
            self._was_closed_here = True
            return
        # In the end of the interpreter a thread may be in a call and never come out of it.
        if self.turn.acquire(timeout=-1 if self._announce else 1.0):
            try:
                self._finish()
            finally:
                self.turn.release()

    def _finish(self) -> None:
        """With no call under way: ends the thread, and everything with it."""
        if self._closed:
            return
        self._ender = threading.get_ident()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._closed = True
        linger = 0.0
        try:
            if self._announce:
                linger = self._say_goodbye()
        finally:
            self._free(linger)

    @abstractmethod
    def _say_goodbye(self) -> float:
        """Tells the peers, after the thread and all calls; so long goes out what was said last."""

    # Waiting ----------------------------------------------------------------------------------

    def _poller(self, *descriptors: int) -> select.poll:
        poller = select.poll()
        for descriptor in (self._closing_event, *descriptors):
            poller.register(descriptor, select.POLLIN)
        return poller

    @staticmethod
    def _sleep(poller: select.poll, seconds: float | None) -> None:
        """Until a descriptor has news, or sooner; rounded up, or a wait would end before its
        deadline. An hour at most: milliseconds in an int end after 24 days."""
        poller.poll(None if seconds is None else int(min(seconds, 3600.0) * 1000) + 1)

    def wait(
        self,
        ready: Callable[[], T | None],
        deadline: float | None,
        timeout: float | None,
        who: Callable[[], str],
        cancel: Asked | None = None,
        stall: Callable[[float], str | None] | None = None,
        poller: select.poll | None = None,
    ) -> T:
        """Ticks until `ready` returns something, with the lock, and returns that.

        What is there wins, then `cancel`, then the deadline, of `timeout` seconds, whose error
        names `who` was waited for. After a while the log says what `stall` says.
        """
        voice = None if stall is None else Stall(stall)
        while True:
            with self.lock:
                found = ready()
                if found is not None:
                    return found
                due = self._tick()
                found = ready()
                if found is not None:
                    return found
                if voice is not None:
                    voice.report()
            if cancel is not None and cancel.is_set():
                raise Cancelled
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                with self.lock:
                    raise TimedOut(f"gave up after {timeout} s waiting for {who()}", timeout)
            ends = [end - now for end in (due, deadline) if end is not None]
            self._sleep(poller or self._call_poller, max(0.0, min([SLICE, *ends])))

    @abstractmethod
    def _tick(self) -> float | None:
        """Hears, and does what is due, with the lock; when there will be more."""

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                self._serve()
        except BaseException as error:  # nobody else would ever hear of it
            self._broken = error
            logger.exception("the thread of a remote end failed")
        # If a call is under way, or another thread ends this end, that does it.
        if self._ends_itself and self.turn.acquire(timeout=0):
            try:
                self._finish()
            finally:
                self.turn.release()

    @abstractmethod
    def _serve(self) -> None:
        """Does what is due and sleeps until something is."""


_ends: weakref.WeakSet[Any] = weakref.WeakSet()


def _at_exit() -> None:
    """Registered after pyzmq's collector registered its own end, and so called before that: what
    libzmq still holds of lent memory must be given back while somebody takes it."""
    for end in list(_ends):
        end.abandon()


atexit.register(_at_exit)
