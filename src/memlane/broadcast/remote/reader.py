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
from memlane.broadcast.remote.refusals import refusal
from memlane.broadcast.remote.sockets import can_receive, receive, signal_of
from memlane.broadcast.remote.stream import Stream
from memlane.broadcast.remote.watch import EVENTS, Watch
from memlane.broadcast.remote.wire import (
    HEADER_BYTES,
    Absent,
    Header,
    Hello,
    Refused,
    Ring,
    Welcome,
    What,
    body_of,
    control,
    header_of,
)
from memlane.errors import (
    Cancelled,
    InvalidType,
    MemlaneError,
    TimedOut,
    WriterClosed,
    WriterDied,
    WriterUnreachable,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane.broadcast.handle import Handle

# An acknowledgement may wait so long for company, if the reader waits, too.
ACK_DELAY = 0.02
_MOST_UNACKED = 2 << 20  # bytes: the writer's memory is used again while it is in the cache
ATTACH_SECONDS = 10.0
_NOW = int(zmq.DONTWAIT)


class RemoteReader(RemoteEnd):
    """Takes one writer's messages, each once and in order, undecoded.

    Args:
        handle: of the queue.
        rank: of this reader.
        secret: of the place that it asks for.
        host: where it may share memory with other readers; empty: nowhere.

    Raises:
        WriterUnreachable: nobody answers there.
        AccessRefused: the writer there does not know the key.
        RankTaken: somebody has, or had, that rank or place.

    Acknowledgements go back a quarter of the window at a time, or when the reader has waited for
    20 ms. While the application computes, libzmq's thread receives and the kernel proves that
    this host lives; the thread here only says hello again after a connection was lost.

    Attributes:
        ring: of this host's readers, to be made or read from; None: messages are for this one.
        on_absent: hears how many are missing beside the ring, and which of its places are free.
    """

    def __init__(self, handle: Handle, rank: int, secret: str, host: str = "") -> None:
        endpoint = address.endpoint_of(handle.remote_subscribe_addr or "")
        super().__init__(f"reader-{rank}")
        with self._opening():
            self._open(handle, rank, secret, host, endpoint)

    def _open(
        self, handle: Handle, rank: int, secret: str, host: str, endpoint: address.Endpoint
    ) -> None:
        self.rank = rank
        self.taken = self.bytes = self.waits = 0
        self.last_progress = time.monotonic()
        self.writer_pid = self.window = self.window_bytes = 0
        self.endpoint = endpoint
        self.ring: Ring | None = None
        self.on_absent: Callable[[int, list[int]], None] = lambda _elsewhere, _free: None
        self._handle = handle
        self._secret = secret
        self._host = host
        self._session = os.urandom(16)
        self._bound = handle.remote_liveness
        self._stream = Stream()
        self._inbox: deque[Message] = deque()
        self._failure: MemlaneError | None = None  # what every call raises once all is taken
        self._absent: list[str] | None = None
        self._is_ready = self._is_ended = self._is_seen = False
        self._watch = Watch(endpoint.text, self._bound)
        self._ack_messages = self._ack_bytes = 1  # so many more, and they are acknowledged
        self._acked = self._ack_at = self._ack_at_bytes = 0
        self._has_news = self._is_torn = False
        self._news = self._event()
        self.socket = address.connecting(self._context, endpoint.is_ipv6, self._bound)
        identify(self.socket, handle.remote_server_key, secret)
        self._monitor = self._monitor_of(self.socket, EVENTS)
        self._writer_fd = signal_of(self.socket)
        self._call_poller = self._poller(self._writer_fd, self._news)
        self._thread_poller = self._poller(signal_of(self._monitor))
        self.socket.connect(endpoint.text)
        self._start_thread()
        self._until(lambda: self._stream.is_welcome)

    def _until(self, is_done: Callable[[], bool], say: Callable[[], None] | None = None) -> None:
        """Hears the writer until `is_done`; says something meanwhile, in case it gets lost."""
        deadline = time.monotonic() + ATTACH_SECONDS
        patience = time.monotonic() + max(self._bound, address.FIRST_CONTACT)
        said_at = 0.0
        while True:
            with self._lock:
                self._receive()
                self.check()
                if self._failure is not None:
                    raise self._failure
                if is_done():
                    return
                now = time.monotonic()
                if say is not None and now - said_at >= 1.0:
                    say()
                    said_at = now
                is_nobody_there = now >= patience and not self._watch.was_accepted
            if is_nobody_there or now >= deadline:
                raise WriterUnreachable(
                    self.endpoint.text,
                    "nobody accepts a connection"
                    if is_nobody_there
                    else f"no answer within {ATTACH_SECONDS} s",
                )
            self._sleep(self._call_poller, SLICE)

    def _share_nothing(self) -> None:
        self._host, self.ring = "", None
        if not self._stream.is_welcome:
            self._greet()

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
        stall = None
        while True:
            with self._lock:
                if self._inbox or self._receive(until_whole=True):
                    return self._next()
                self.check()
                self._raise_end()
                pause = self._acknowledge_later()
                if stall is None:
                    self.waits += 1
                    stall = Stall(self._line)
                stall.speak()
            if cancel is not None and cancel.is_set():
                raise Cancelled
            left = remaining(deadline)
            if left == 0:
                raise TimedOut(f"gave up after {timeout} s waiting for {self._writer()}", timeout)
            self._sleep(self._call_poller, pause if left is None else min(left, pause))

    def _next(self) -> Message:
        message = self._inbox.popleft()
        self.taken = message.sequence + 1
        self.bytes += len(message.memory)
        self.last_progress = time.monotonic()
        if self.taken >= self._ack_at or self.bytes >= self._ack_at_bytes:
            self._acknowledge()
        return message

    def _acknowledge(self) -> None:
        if self.ring is None:  # else it says what its host's readers have read
            self._say(What.ACK, self.taken)
        self._note_acknowledged()

    def _note_acknowledged(self) -> None:
        self._acked = self.taken
        self._ack_at = self.taken + self._ack_messages
        self._ack_at_bytes = self.bytes + self._ack_bytes

    def _acknowledge_later(self) -> float:
        """Acknowledges if it is time; how long to sleep at most."""
        if self.taken == self._acked:
            return SLICE
        left = ACK_DELAY - (time.monotonic() - self.last_progress)
        if left > 0:
            return left
        self._acknowledge()
        return SLICE

    def _say(self, what: What, sequence: int = 0) -> None:
        with suppress(zmq.Again):  # without a connection; the next hello says as much
            self.socket.send(control(Header(what, self._stream.epoch, sequence)), _NOW)

    # Frames -----------------------------------------------------------------------------------

    def _receive(self, *, until_whole: bool = False) -> bool:
        """Reads what has come, with the lock; is there a whole message?"""
        if self._has_news:  # said by the thread, which has used the socket
            with suppress(BlockingIOError):
                os.eventfd_read(self._news)
            self._has_news = False
        if self._is_torn:
            self._more()
            self._greet()  # from the frame that is wanted on, once more
        self._is_torn = True  # until this is over: a signal handler may raise anywhere
        while True:
            try:
                part = receive(self.socket, _NOW)
            except zmq.Again:
                break
            if not self._stream.take_whole(part, self._inbox):
                payload = self._more()
                if part and (payload is None or len(payload)):  # else the writer has given it up
                    self._hear(part, payload)
            if until_whole and self._inbox:
                break
        self._is_torn = False
        return bool(self._inbox)

    def _more(self) -> memoryview | None:
        """What follows in the same frame, the last part of it."""
        payload = None
        while self.socket.get(zmq.RCVMORE):
            payload = receive(self.socket, _NOW, False).buffer
        return payload

    def _hear(self, part: bytes, payload: memoryview | None) -> None:
        header = header_of(part)
        if header.what == What.MESSAGE:
            if header.epoch != self._stream.epoch:
                raise self._stream.foreign(header)
            if payload is None:
                payload = memoryview(part)[HEADER_BYTES:]
            self._stream.take(header, payload, self._inbox)
        elif header.what == What.WELCOME:
            self._be_welcome(header, body_of(part, Welcome))
        elif header.what == What.REFUSED:
            refused = body_of(part, Refused)
            if refused.code == "no_relay":
                self._share_nothing()
            else:
                self._failure = self._failure or refusal(refused, self.writer_pid)
        elif header.what == What.SEEN:
            self._is_seen = True
        elif header.epoch != self._stream.epoch:
            raise self._stream.foreign(header)
        elif header.what == What.READY:
            self._is_ready = True
            self.on_absent(0, [])
        elif header.what == What.ABSENT:
            absent = body_of(part, Absent)
            unnamed = absent.beside + len(absent.places) - len(absent.names)
            self._absent = absent.names + ["another reader"] * unnamed
            self.on_absent(absent.beside, absent.places)
        elif header.what == What.END and self._stream.end(header):
            self._is_ended = True
            self._say(What.END, header.sequence)  # so that the writer may leave

    def _be_welcome(self, header: Header, welcome: Welcome) -> None:
        if self._stream.epoch not in (0, header.epoch):
            raise self._stream.foreign(header)
        self.writer_pid = welcome.pid
        self.ring = welcome.ring
        self.window, self.window_bytes = welcome.window, welcome.window_bytes
        self._ack_messages = max(1, welcome.window // 4)
        self._ack_bytes = max(1, min(welcome.window_bytes // 4, _MOST_UNACKED))
        self._ack_at = self._ack_at_bytes = 0
        self._stream.begin(header)
        if self.taken:  # what was said of it may have got lost
            self._acknowledge()

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
        state = "connected" if self._watch.is_connected else "without a connection"
        who = f"the writer (pid {self.writer_pid} at {self.endpoint.text}, {state}, last message "
        return f"{who}{time.monotonic() - self.last_progress:.1f} s ago)"

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
        with self.turn:
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
                    who = names_of(self._absent or [self._writer()])
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
                self._wake()
        if self._watch.was_cut:
            is_deserted = address.is_deserted(self.endpoint)
            with self._lock:
                self._watch.note_probe(is_deserted)
                self._wake()
        self._sleep(self._thread_poller, None)

    def _wake(self) -> None:
        self._has_news = True
        os.eventfd_write(self._news, 1)

    def _greet(self) -> None:
        self._stream.is_welcome = False
        hello = Hello(
            self._handle.queue_id,
            self.rank,
            os.getpid(),
            self._session,
            "" if self._handle.remote_server_key else self._secret,
            self.taken,
            *self._stream.wanted,
            self._host,
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
