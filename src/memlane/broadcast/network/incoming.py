"""The frames that a reader receives from its writer, and those that it answers with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from memlane._net.sockets import can_receive
from memlane.broadcast.network.driver import NetworkEnd, WakeUp, logger
from memlane.errors import CorruptMessage

if TYPE_CHECKING:
    from memlane.broadcast.network.transport import Connecting
    from memlane.broadcast.protocol.reader_session import ReaderSession


class Incoming:
    """Passes frames between a reader's transport and its session; with the end's lock held.

    Attributes:
        pending: set when there is something to look at that libzmq does not signal.
        lacks_memory: there was no memory for a message; the next call raises that.
        served_at: when a call, or an event loop, last received.
        waits: number of calls that had to wait.
    """

    def __init__(
        self,
        end: NetworkEnd,
        session: ReaderSession,
        transport: Connecting,
        pending: WakeUp,
        rank: int,
    ) -> None:
        self._end, self._session, self._transport, self._rank = end, session, transport, rank
        self.pending = pending
        self.lacks_memory = self._is_called = self._was_interrupted = False
        self._frame: tuple[bytes, memoryview] | None = None  # a large one, until it is handled
        self.served_at = 0.0
        self.waits = 0

    def note_call(self, is_called: bool) -> None:
        self._is_called = is_called

    @property
    def is_called(self) -> bool:
        """True if a call receives. A signal handler may keep a call from noting its end."""
        return self._is_called and self._end.guard.thread != 0

    def count_wait(self, counts: bool) -> None:
        """Counts a wait of an awaited call, if `counts`."""
        self.waits += counts

    def note_served(self) -> float:
        """Returns the time, at which a call, or an event loop, receives."""
        self.served_at = time.monotonic()
        return self.served_at

    def wake(self) -> None:
        """Makes a call that is blocked in another thread look again."""
        self._end.wake(self.pending)

    def receive(self, *, until_whole: bool = False, most: int = -1) -> bool:
        """Receives what has arrived. Returns whether there is a complete message. After `most`
        frames it wakes the thread that waits instead of going on."""
        session, transport = self._session, self._transport
        if self.pending.is_set:  # by the thread, which has used the socket
            self.pending.clear()
        is_here = self._frame is not None
        if self._frame is not None:
            self._take(*self._frame)
            self._frame = None
        if self._was_interrupted and not (is_here and session.is_welcome):
            transport.rest()
            if session.doubt(time.monotonic()):
                self._end.wake_thread()
        self._was_interrupted = True  # until this is over: a signal handler may raise anywhere
        while (part := transport.next_part()) is not None:
            if not session.receive_whole(part):
                payload = transport.rest()
                if payload is None:
                    self._take(part, None)
                else:  # most of the time is spent below, and an interrupt need not cost the frame
                    self._frame = part, payload
                    self._take(part, payload)
                    self._frame = None
            most -= 1
            if most == 0:
                self.wake()
            if (until_whole and session.inbox) or most == 0:
                break
        self._was_interrupted = self.lacks_memory = False
        if session.out:
            self.flush()
        return bool(session.inbox)

    def _take(self, part: bytes, payload: memoryview | None) -> None:
        """Passes a frame on; one that has been passed on before changes nothing."""
        if not part or (payload is not None and not len(payload)):
            return  # an empty part voids the frame
        try:
            self._session.receive(part, payload, time.monotonic())
        except CorruptMessage as error:
            logger.warning(
                "reader %d received a damaged frame and asks for it again: %s", self._rank, error
            )

    def receive_all(self) -> None:
        try:
            self.receive()
        except MemoryError:  # the next call tries again, and raises it if that fails, too
            self.lacks_memory = True

    def listen(self, most: int) -> None:
        """Receives until there is a message, or libzmq will signal the next frame; or until
        `most` frames were received, and then signals by itself."""
        try:
            while not (self._session.inbox or self.receive(until_whole=True, most=most)):
                if self.pending.is_set or not can_receive(self._transport.socket):
                    break  # else sending has consumed the signal
        except MemoryError:  # the next call raises it
            self.lacks_memory = True

    def acknowledge(self, now: float) -> float | None:
        """Acknowledges what was taken, if that is due and nothing else is to be taken; returns when
        it is."""
        session = self._session
        due = None if session.inbox else session.acknowledge_later(now)
        self.flush()
        return due

    def flush(self) -> None:
        """Sends what is due. A frame whose sending was interrupted is sent again."""
        out = self._session.out
        while out:
            if not self._transport.send(out[0]):
                out.clear()
                return
            out.popleft()
