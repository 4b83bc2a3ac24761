"""What the descriptor of an end shows while nobody is in a call of it."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

from memlane._net.sockets import can_receive
from memlane.broadcast.watching import JointWatch
from memlane.errors import Closed

if TYPE_CHECKING:
    from collections.abc import Callable

    import zmq

    from memlane.broadcast.network.ahead import Ahead
    from memlane.broadcast.network.driver import NetworkEnd
    from memlane.broadcast.network.incoming import Incoming
    from memlane.broadcast.protocol.reader_session import ReaderSession
    from memlane.broadcast.watching import ShownWatch

_AT_ONCE = 4  # frames, of 512 KiB at most, that an event loop receives before others have a turn


class _News:
    """What is signalled to a reader that receives by itself: by libzmq, or that there is more."""

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

    def watch(self) -> ShownWatch:
        """From now on the thread receives at once, unless a call does. What has come before is
        shown when this returns."""
        shown = self._end.watched()
        with self._end.locked() as is_free:
            self.is_selected = True
            if is_free and not self._incoming.is_called:
                self.show(_AT_ONCE)
            self._end.nudge()
        return shown

    def signal(self, events: int) -> JointWatch:
        """What an event loop watches beside `events`, libzmq's descriptor. Without the thread: it
        would take two changes of threads more."""
        return JointWatch(
            self._end.watched(),
            _News(events, self.hear_now),
            _News(self._incoming.news.descriptor, bool),  # whose message the other receives
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
        if is_waiting:
            self._incoming.count_wait(is_first)
            with self._end.locked():
                if can_receive(self._socket):
                    self._incoming.wake()
                self._show_state()

    def begin_call(self) -> bool:
        """Returns whether a coroutine waits, for `end_call`; it does not while this call runs."""
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
            must_look = self.is_selected and (self._is_quiet or self._incoming.news.is_set)
            if is_late or must_look:
                self._end.nudge()
        return True

    def note_sleep(self, is_quiet: bool, looks_at: float) -> None:
        """The thread sleeps until then; `is_quiet`: frames do not wake it."""
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
        has_ended = session.is_ended or session.failure is not None
        has_more = bool(session.inbox) or self._incoming.lacks_memory
        is_any = has_more or self._ahead.has_more(returns) or has_ended
        return is_any or session.death(self._end.ran_at) is not None
