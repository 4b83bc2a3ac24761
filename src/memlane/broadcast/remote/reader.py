"""A reader on another host than its writer."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from memlane._failures import names_of
from memlane.broadcast.remote import address, tcp
from memlane.broadcast.remote.end import SLICE, RemoteEnd, Stall, deadline_of, remaining
from memlane.broadcast.remote.message import Message
from memlane.broadcast.remote.places import identify
from memlane.broadcast.remote.sockets import can_receive, receive, signal_of
from memlane.broadcast.remote.stream import Stream
from memlane.broadcast.remote.watch import EVENTS, Watch
from memlane.broadcast.remote.wire import (
    HEADER_BYTES,
    MOST_CONTROL,
    PIECE,
    SMALL,
    Absent,
    Header,
    Hello,
    Refused,
    Welcome,
    What,
    body_of,
    control,
    header_of,
    whole_message,
)
from memlane.errors import (
    Cancelled,
    CorruptMessage,
    InvalidArgument,
    InvalidType,
    MemlaneError,
    RankTaken,
    TimedOut,
    WriterClosed,
    WriterDied,
    WriterUnreachable,
)

if TYPE_CHECKING:
    from memlane.broadcast.handle import Handle

# An acknowledgement may wait so long for company, if the reader waits, too.
ACK_DELAY = 0.02
_MOST_UNACKED = 2 << 20  # bytes: the writer's memory is used again while it is in the cache
ATTACH_SECONDS = 10.0
_NOW = int(zmq.DONTWAIT)
_RECONNECT_MS = 50
_CONNECT_MS = 1000


class RemoteReader(RemoteEnd):
    """Takes one writer's messages, each once and in order, undecoded.

    Args:
        handle: of the queue.
        rank: of this reader.
        secret: of the place that it asks for.

    Raises:
        WriterUnreachable: nobody answers there.
        AccessRefused: the writer there does not know the key.
        RankTaken: somebody has, or had, that rank or place.

    Acknowledgements go back a quarter of the window at a time, or when the reader has waited for
    20 ms. While the application computes, libzmq's thread receives and the kernel proves that
    this host lives; the thread here only says hello again after a connection was lost.
    """

    def __init__(self, handle: Handle, rank: int, secret: str) -> None:
        endpoint = address.endpoint_of(handle.remote_subscribe_addr or "")
        super().__init__(f"reader-{rank}")
        with self._opening():
            self._open(handle, rank, secret, endpoint)

    def _open(self, handle: Handle, rank: int, secret: str, endpoint: address.Endpoint) -> None:
        self.rank = rank
        self.messages = self.bytes = self.waits = 0
        self.last_progress = time.monotonic()
        self.writer_pid = 0
        self.endpoint = endpoint
        self._handle = handle
        self._secret = secret
        self._session = os.urandom(16)
        self._bound = handle.remote_liveness
        self._stream = Stream()
        self._epoch = 0
        self._inbox: deque[Message] = deque()
        self._failure: MemlaneError | None = None  # what every call raises once all is taken
        self._absent: list[str] | None = None
        self._is_ready = self._is_ended = False
        self._watch = Watch(endpoint.text, self._bound)
        self._taken = self._acked = 0
        self._unacked_bytes = 0
        self._ack_messages = self._ack_bytes = 1
        self._has_news = False
        self._news = self._event()
        self.socket = self._connecting()
        self._monitor = self._monitor_of(self.socket, EVENTS)
        self._writer_fd = signal_of(self.socket)
        self._call_poller = self._poller(self._writer_fd, self._news)
        self._thread_poller = self._poller(signal_of(self._monitor))
        self.socket.connect(endpoint.text)
        self._thread.start()
        self._attach()

    def _connecting(self) -> zmq.Socket[bytes]:
        connecting = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),  # the writer keeps to its window
            (zmq.MAXMSGSIZE, PIECE + MOST_CONTROL),
            (zmq.HANDSHAKE_IVL, int(1000 * max(self._bound, 3.0))),
            (zmq.RECONNECT_IVL, _RECONNECT_MS),
            (zmq.CONNECT_TIMEOUT, _CONNECT_MS),
            (zmq.IPV6, int(self.endpoint.is_ipv6)),
            *tcp.KEEP_ALIVE,
        ):
            connecting.set(option, value)
        identify(connecting, self._handle.remote_server_key, self._secret)
        return connecting

    def _attach(self) -> None:
        deadline = time.monotonic() + ATTACH_SECONDS
        patience = time.monotonic() + self._bound
        while True:
            with self._lock:
                self._receive()
                self.check()
                if self._failure is not None:
                    raise self._failure
                if self._epoch:
                    return
                now = time.monotonic()
                is_nobody_there = now >= patience and not self._watch.was_accepted
            if is_nobody_there or now >= deadline:
                raise WriterUnreachable(
                    self.endpoint.text,
                    "nobody accepts a connection"
                    if is_nobody_there
                    else f"no answer within {ATTACH_SECONDS} s",
                )
            self._sleep(self._call_poller, SLICE)

    # Taking -----------------------------------------------------------------------------------

    def take(
        self, timeout: float | None, cancel: threading.Event | None, deadline: float | None
    ) -> Message:
        """The next message, not decoded; inside a call. It counts as taken from now on.

        Raises:
            TimedOut, Cancelled: nothing was taken.
            WriterClosed, WriterDied: everything that was sent, or came, was taken.
            CorruptMessage: a frame came that does not follow; it was dropped.
        """
        if cancel is not None and not hasattr(cancel, "is_set"):
            raise InvalidType("cancel must be a threading.Event or None")
        with self._lock:
            if (message := self._next()) is not None:
                return message
        self.waits += 1
        stall = Stall(self._line)
        while True:
            with self._lock:
                if (message := self._next()) is not None:
                    return message
                self.check()
                self._raise_end()
                pause = self._acknowledge_later()
                stall.speak()
            if cancel is not None and cancel.is_set():
                raise Cancelled
            left = remaining(deadline)
            if left == 0:
                raise TimedOut(f"gave up after {timeout} s waiting for {self._writer()}", timeout)
            self._sleep(self._call_poller, pause if left is None else min(left, pause))

    def _next(self) -> Message | None:
        if not self._inbox:
            self._receive(until_whole=True)
            if not self._inbox:
                return None
        message = self._inbox.popleft()
        size = len(message.memory)
        self._taken = message.sequence + 1
        self._unacked_bytes += size
        self.messages += 1
        self.bytes += size
        self.last_progress = time.monotonic()
        unacked = self._taken - self._acked
        if unacked >= self._ack_messages or self._unacked_bytes >= self._ack_bytes:
            self._acknowledge()
        return message

    def _acknowledge(self) -> None:
        self._say(What.ACK, self._taken)
        self._acked, self._unacked_bytes = self._taken, 0

    def _acknowledge_later(self) -> float:
        """Acknowledges if it is time; how long to sleep at most."""
        if self._taken == self._acked:
            return SLICE
        left = ACK_DELAY - (time.monotonic() - self.last_progress)
        if left > 0:
            return left
        self._acknowledge()
        return SLICE

    def _say(self, what: What, sequence: int = 0) -> None:
        with suppress(zmq.Again):  # without a connection; the next hello says as much
            self.socket.send(control(Header(what, self._epoch, sequence)), _NOW)

    # Frames -----------------------------------------------------------------------------------

    def _receive(self, *, until_whole: bool = False) -> None:
        """Reads what has come; with the lock."""
        if self._has_news:  # said by the thread, which has used the socket
            self._has_news = False
            os.eventfd_read(self._news)
        while True:
            try:
                frame = receive(self.socket, _NOW, False)
            except zmq.Again:
                return
            if len(frame) > HEADER_BYTES + SMALL:  # a piece
                self._hear(frame.buffer)
            else:
                part = frame.bytes
                sequence, kind = whole_message(part, self._epoch)
                if kind >= 0 and self._stream.pass_whole(sequence):
                    self._inbox.append(Message(sequence, kind, part[HEADER_BYTES:]))
                else:
                    self._hear(memoryview(part))
            if until_whole and self._inbox:
                return

    def _hear(self, part: memoryview) -> None:
        header = header_of(part)
        if header.what == What.MESSAGE:
            if header.epoch != self._epoch:
                raise self._stream.foreign(header)
            try:
                message = self._stream.add(header, part[HEADER_BYTES:])
            except (CorruptMessage, MemoryError):
                self._greet()  # from the frame that is wanted on, once more
                raise
            if message is not None:
                self._inbox.append(message)
        elif header.what == What.WELCOME:
            self._be_welcome(header, body_of(part, Welcome))
        elif header.what == What.REFUSED:
            self._failure = self._failure or _refusal(body_of(part, Refused), self.writer_pid)
        elif header.epoch != self._epoch:
            raise self._stream.foreign(header)
        elif header.what == What.READY:
            self._is_ready = True
        elif header.what == What.ABSENT:
            self._absent = body_of(part, Absent).names
        elif header.what == What.END:
            self._stream.end(header)
            self._is_ended = True

    def _be_welcome(self, header: Header, welcome: Welcome) -> None:
        if self._epoch not in (0, header.epoch):
            raise self._stream.foreign(header)
        self._epoch = header.epoch
        self.writer_pid = welcome.pid
        self._ack_messages = max(1, welcome.window // 4)
        self._ack_bytes = max(1, min(welcome.window_bytes // 4, _MOST_UNACKED))
        self._stream.begin(header)

    # The writer's fate --------------------------------------------------------------------------

    def _raise_end(self) -> None:
        """Everything that came is taken: is it all that there will be?"""
        if self._is_ended:
            raise WriterClosed("the writer closed the queue, and everything it sent has been read")
        if self._failure is None:
            why = self._watch.death()
            if why is not None:
                self._failure = WriterDied(self.writer_pid, f" at {self.endpoint.text}: {why}")
        if self._failure is not None:
            raise self._failure

    def _writer(self) -> str:
        since = time.monotonic() - self.last_progress
        state = "connected" if self._watch.is_connected else "without a connection"
        return (
            f"the writer (pid {self.writer_pid} at {self.endpoint.text}, {state}, last message "
            f"{since:.1f} s ago)"
        )

    def _line(self, waited: float) -> str | None:
        """An idle queue is no news; a writer that is gone is."""
        if self._watch.is_connected:
            return None
        return (
            f"{self._writer()} kept reader {self.rank} (pid {os.getpid()}) waiting for "
            f"{waited:.1f} s"
        )

    def wait_until_ready(self, timeout: float | None) -> None:
        """Returns when the writer has said that everybody has attached."""
        deadline = deadline_of(timeout)
        with self:
            stall = Stall(
                lambda waited: (
                    f"{names_of(self._absent or ['the writer'])} kept pid {os.getpid()} waiting "
                    f"for {waited:.1f} s: not everybody has attached to the queue"
                )
            )
            asked_at = 0.0
            while True:
                with self._lock:
                    self._receive()
                    self.check()
                    if self._is_ready:
                        return
                    self._raise_end()
                    if time.monotonic() - asked_at >= 1.0:  # again, if the connection was lost
                        self._say(What.ASK)
                        asked_at = time.monotonic()
                    stall.speak()
                left = remaining(deadline)
                if left == 0:
                    who = names_of(self._absent) if self._absent else self._writer()
                    raise TimedOut(f"gave up after {timeout} s waiting for {who}", timeout)
                self._sleep(self._call_poller, SLICE if left is None else min(left, SLICE))

    # The thread -------------------------------------------------------------------------------

    def _serve(self) -> None:
        with self._lock:
            while can_receive(self._monitor):
                event = parse_monitor_message(self._monitor.recv_multipart())
                if self._watch.note(event["event"], event["value"]):
                    self._greet()
                self._failure = self._failure or self._watch.refusal
                self._has_news = True
                os.eventfd_write(self._news, 1)
        self._sleep(self._thread_poller, None)

    def _greet(self) -> None:
        self._stream.is_welcome = False
        sequence, piece = self._stream.wanted
        hello = Hello(
            self._handle.queue_id,
            self.rank,
            os.getpid(),
            self._session,
            "" if self._handle.remote_server_key else self._secret,
            self._taken,
            sequence,
            piece,
        )
        with suppress(zmq.Again):
            self.socket.send(control(Header(What.HELLO, 0), hello), zmq.DONTWAIT)

    def _say_goodbye(self) -> None:
        if self._watch.is_connected and not self._is_ended:
            self._say(What.BYE)
            self._stop_monitor()
            self._monitor.close(0)
            self.socket.close(int(1000 * min(self._bound, 1.0)))
            self._context.term()

    def _drop_inherited(self) -> None:
        tcp.close_inherited(self.endpoint.host, self.endpoint.port, as_writer=False)


def _refusal(refused: Refused, writer_pid: int) -> MemlaneError:
    match refused.code:
        case "rank_taken":
            return RankTaken(refused.text)
        case "place_taken":
            return PlaceTaken(refused.text)
        case "gone":
            return WriterDied(writer_pid, f" for this reader: {refused.text}")
        case _:
            return InvalidArgument(refused.text)


class PlaceTaken(RankTaken):
    """That key is of another reader; with more keys there may be another place."""
