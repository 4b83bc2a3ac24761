"""The descriptors of the two ends, as they are shown while nobody is in a call."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from memlane._base.blame import REMOTE_WINDOW, VLLM_WORDS
from memlane._base.diagnosis import blocked
from memlane._net.sockets import can_receive
from memlane.broadcast.network.driver import NetworkEnd, timed_out
from memlane.broadcast.watching import JointWatch
from memlane.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable

    import zmq

    from memlane.broadcast.local import LocalWriter
    from memlane.broadcast.network.ahead import Ahead
    from memlane.broadcast.network.incoming import Incoming
    from memlane.broadcast.network.sending import Sending
    from memlane.broadcast.protocol.reader_session import ReaderSession
    from memlane.broadcast.protocol.writer_session import WriterSession
    from memlane.broadcast.watching import ShownWatch, Watching
    from memlane.errors import MemlaneError

FULL = f"{REMOTE_WINDOW}{VLLM_WORDS}"
_AT_ONCE = 4  # frames, of 512 KiB at most, that an event loop receives before others have a turn


class _Signal:
    """A descriptor that signals to a reader without a thread: libzmq's, or that there is more."""

    def __init__(self, descriptor: int, hear: Callable[[], bool]) -> None:
        self._descriptor, self._hear = descriptor, hear

    def fileno(self) -> int:
        return self._descriptor

    @property
    def is_readable(self) -> bool:
        return self._hear()


class AwaitedMessage:
    """A reader's descriptor: readable while a call would not wait.

    Attributes:
        is_selected: somebody may wait for the descriptor at any time.
        is_awaited: a coroutine waits for the next message.
    """

    def __init__(
        self,
        end: NetworkEnd,
        session: ReaderSession,
        incoming: Incoming,
        ahead: Ahead,
        socket: zmq.Socket[bytes],
    ) -> None:
        self._end, self._session, self._incoming, self._ahead = end, session, incoming, ahead
        self._socket = socket
        self.is_selected = False
        self.is_awaited = False
        self._is_quiet, self._looks_at = True, 0.0  # whether, and until when the thread sleeps
        self._is_in_call = False  # or a signal handler raised in the end of the last one

    def watch(self) -> ShownWatch:
        """Makes the thread receive at once from now on, unless a call does. What has come before is
        shown when this returns."""
        shown = self._end.watched()
        with self._end.locked() as is_free:
            self.is_selected = True
            if is_free and not self._incoming.is_called:
                self.show(_AT_ONCE)
            self._end.wake_thread()
        return shown

    def signal(self, events: int) -> JointWatch:
        """Returns the descriptors that an event loop watches, `events`, libzmq's, among them. The
        end's thread has no part in it: it would take two changes of threads more."""
        return JointWatch(
            self._end.watched(),
            _Signal(events, self.hear_now),
            _Signal(self._incoming.pending.descriptor, bool),  # whose message the other receives
        )

    def hear_now(self) -> bool:
        """Receives what has arrived; returns whether a call would not wait. If it would, libzmq
        will signal, or there is more than an event loop should receive at once."""
        with suppress(Closed), self._end.locked():
            self._incoming.note_served()
            self._incoming.listen(_AT_ONCE)
            if self._incoming.is_called:  # another thread's call, for which the signal was
                self._incoming.wake()
            return self._is_ready()
        return True

    def show_waiting(self, is_waiting: bool, is_first: bool) -> None:
        self.is_awaited = is_waiting
        self._end.show_wait("waiting" if is_waiting else "elsewhere")
        if is_waiting:
            self._incoming.count_wait(is_first)
            with self._end.locked():
                if can_receive(self._socket):
                    self._incoming.wake()
                self._show_state()

    def begin_call(self) -> bool:
        """Returns whether a coroutine waits, for `end_call`; it does not while this call runs."""
        self._is_in_call = self._end.shown is not None
        was_awaited, self.is_awaited = self.is_awaited, False
        return was_awaited

    def end_call(self, was_awaited: bool, returns: int = 0) -> bool:
        """Shows whether another call would wait, after one that `returns` a message; wakes the
        thread if it is to look sooner. Returns False if nobody has asked for the descriptor."""
        if self._end.shown is None:
            return False
        with self._end.lock:
            if self.is_selected or was_awaited:
                ack_at = self.show(_AT_ONCE, returns)
            else:
                ack_at = self._incoming.acknowledge(time.monotonic())
                self._show_state(returns)
            is_late = ack_at is not None and ack_at < self._looks_at
            must_look = self.is_selected and (self._is_quiet or self._incoming.pending.is_set)
            if is_late or must_look:
                self._end.wake_thread()
            self._is_in_call = False
        return True

    def end_interrupted_call(self) -> None:
        """Makes the thread do what `end_call` did not get to, after the call."""
        if self._is_in_call:
            self._is_in_call = False
            self._end.wake_thread()

    def note_sleep(self, is_quiet: bool, looks_at: float) -> None:
        """Notes that the thread sleeps until then; `is_quiet`: frames do not wake it."""
        self._is_quiet, self._looks_at = is_quiet, looks_at

    def show(self, most: int = -1, returns: int = 0) -> float | None:
        """Shows whether a call would not wait; returns when to acknowledge what was taken. Listens
        for that, as `Incoming.listen` says."""
        ack_at = self._incoming.acknowledge(time.monotonic())
        self._incoming.listen(most)
        self._show_state(returns)
        return ack_at

    def _show_state(self, returns: int = 0) -> None:
        self._end.shown.show(self._is_ready(returns))  # type: ignore[union-attr]  # it is watched

    def _is_ready(self, returns: int = 0) -> bool:
        session = self._session
        if session.is_behind:
            return False  # that is for the ring to say
        has_ended = session.is_ended or session.connection.failure is not None
        has_more = bool(session.inbox) or self._incoming.lacks_memory
        is_any = has_more or self._ahead.has_more(returns) or has_ended
        return is_any or session.connection.death(self._end.ran_at) is not None


class AwaitedRoom:
    """A writer's descriptor: readable while the awaited message fits, or somebody has died.

    Attributes:
        is_awaited: a coroutine waits to send.
    """

    def __init__(
        self, end: NetworkEnd, session: WriterSession, sending: Sending, local: LocalWriter | None
    ) -> None:
        self._end, self._session, self._sending, self._local = end, session, sending, local
        self._ring: Watching | None = None
        self.is_awaited = False

    def signal(self) -> ShownWatch:
        if self._local is not None and self._ring is None:
            self._ring = self._local.watch()
        return self._end.watched()

    def show_waiting(self, is_waiting: bool, _is_first: bool) -> None:
        self.is_awaited = waits_for_ring = is_waiting
        self._end.show_wait("waiting" if is_waiting else "elsewhere")
        if is_waiting:
            with self._end.locked():
                self._sending.recover()  # drops what the ring had no room for
                self.look_again()
                waits_for_ring = self._fits()
        if self._local is not None:
            self._local.show_waiting(waits_for_ring, False)

    def look_again(self) -> None:
        """Notes that what an awaited send waits for may have changed; with the lock held."""
        if self.is_awaited:
            self.show()
            self._end.wake_thread()

    def show(self) -> None:
        self._end.shown.show(self._is_ready())  # type: ignore[union-attr]  # it is awaited

    def ring_in_the_way(self) -> Watching | None:
        """The ring's descriptor if only the ring has no room."""
        is_shown = self._end.shown.is_readable  # type: ignore[union-attr]  # it is awaited
        return None if is_shown or not self._fits() else self._ring

    def _fits(self) -> bool:
        """Returns whether every remote window has room for the awaited message."""
        return self._session.has_room(self._sending.wanted)

    def _is_ready(self) -> bool:
        if self._session.has_dead():
            return True
        if not self._fits():
            return self._local is not None and self._local.has_dead()
        return self._ring is None or self._ring.is_readable

    def timed_out(self, timeout: float | None) -> MemlaneError:
        with self._end.locked():
            if self._local is not None and self._fits():
                return self._local.timed_out(timeout)
            return timed_out(timeout, self._who(), self._end.label)

    def stall_line(self, waited: float) -> str | None:
        with self._end.locked():
            if self._local is not None and self._fits():
                return self._local.stall_line(waited)
            return blocked("writer", waited, FULL, self._who(), self._end.label)

    def _who(self) -> str:
        return self._session.outbox.in_the_way(self._sending.wanted, time.monotonic())
