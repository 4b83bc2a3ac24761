"""A reader on another host than its writer, over a connection of its own."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import NEVER, Deadline
from memlane._base.diagnosis import blocked, no_memory
from memlane._base.handlers import raised_by_handler
from memlane._base.naming import names_of
from memlane._native import fork_generation
from memlane._net.contexts import need_curve
from memlane._net.sockets import can_receive
from memlane._net.tcp import Connection
from memlane.broadcast.network.driver import NetworkEnd, logger, timed_out
from memlane.broadcast.network.transport import Connecting, is_deserted
from memlane.broadcast.protocol.message import decode
from memlane.broadcast.protocol.reader_session import SMALL_KINDS, ReaderSession
from memlane.broadcast.statistics import QueueStatistics, ReaderStatistics
from memlane.broadcast.watching import JointWatch
from memlane.errors import (
    Closed,
    CorruptMessage,
    InvalidType,
    TimedOut,
    WriterUnreachable,
    WrongRole,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import zmq

    from memlane.broadcast.network.driver import Asked
    from memlane.broadcast.options import NetworkAddress
    from memlane.broadcast.protocol.frames import ReportRow, Ring
    from memlane.broadcast.protocol.message import Message
    from memlane.broadcast.watching import ShownWatch


_AT_ONCE = 4  # frames, of 512 KiB at most, that an event loop receives before others have a turn
_ASK_AGAIN = 1.0
_RECENT = 0.5
"""Seconds without a call, or a quarter of the bound if that is less, after which the thread
receives, so that the writer can close meanwhile."""
_LAST_WORDS = 1.0  # seconds for the frames that a reader sends as it leaves


class _News:
    """What is signalled to a reader that receives by itself: by libzmq, or that there is more."""

    def __init__(self, descriptor: int, hear: Callable[[], bool]) -> None:
        self._descriptor, self._hear = descriptor, hear

    def fileno(self) -> int:
        return self._descriptor

    @property
    def is_readable(self) -> bool:
        return self._hear()


class NetworkReader(NetworkEnd):
    """Takes one writer's messages, each once and in order.

    Args:
        address: of the queue's writer.
        rank: of this reader.
        secret: of the place that it asks for.
        host: readers with the same text may share memory; empty: shares none.
        deadline: for attaching.

    Raises:
        WriterUnreachable: nothing accepts a connection there, or the writer is dead.
        AccessRefused: the writer there does not know the key.
        Unsupported: this libzmq was built without CURVE.
        RankTaken: another reader has, or had, that rank or place.
        TimedOut: the writer did not answer in time.

    It acknowledges after a quarter of the window or 2 MiB, or when it has waited for 20 ms. While
    the application computes, libzmq's thread receives, and the kernel proves that this host is
    alive; the thread here sends HELLO after a lost connection, and reads frames after `_RECENT`.
    """

    transport: Connecting
    segment = geometry = None
    position = 0

    def __init__(
        self,
        address: NetworkAddress,
        rank: int,
        secret: str,
        host: str = "",
        deadline: Deadline = NEVER,
    ) -> None:
        if address.server_key:
            need_curve()
        self.endpoint = address.endpoint
        super().__init__(f"reader-{rank}")
        self.rank, self._waits = rank, 0
        self._codec = address.codec
        self._position_behind: Callable[[], int | None] = lambda: None  # in its relay's ring
        self.bound = address.liveness
        self._recent = min(_RECENT, self.bound / 4)
        self._connection: Connection | None = None
        self._has_news = self._was_interrupted = self._lacks_memory = False
        self._is_selected = False  # somebody may wait for the descriptor at any time
        self._is_hearing = self._is_awaited = False  # in a call, or between two
        self._is_quiet, self._looks_at = True, 0.0  # whether, and until when the thread sleeps
        self._asked_at = 0.0
        self._events_at = time.monotonic()  # when connection events were last read
        self._kept: list[Message] = []  # taken, and not decoded yet
        self._ahead: list[Any] = []  # decoded, for this call and the next ones
        self._ahead_at = self._ahead_end = 0  # those that were not returned
        self._ahead_bytes: list[int] = []
        self._is_shown = False  # the descriptor knows that the next one is returned
        with self._opening():
            self.session = ReaderSession(
                address.queue_id,
                rank,
                os.getpid(),
                os.urandom(16),
                "" if address.server_key else secret,
                host,
                self.endpoint.text,
                self.bound,
                time.monotonic(),
            )
            self._news = self._event()
            self.transport = Connecting(
                self._context, self.endpoint, address.server_key, secret, self.bound
            )
            self._call_poller = self._poller(self.transport.news, self._news)
            self._quiet_poller = self._poller(*self.transport.quiet, self._nudge)
            self._full_poller = self._poller(
                *self.transport.quiet, self._nudge, self.transport.news
            )
            self.transport.connect()
            self._start_thread()
            self._until(lambda: self.session.was_welcome, deadline)

    def _until(self, is_done: Callable[[], bool], deadline: Deadline) -> None:
        """Receives until `is_done`, as a step of attaching."""
        session = self.session

        def ready() -> bool | None:
            self.check()
            if session.failure is not None:
                raise session.failure
            if is_done():
                return True
            if (why := session.death(self._ran_at)) is not None:
                raise WriterUnreachable(self.endpoint.text, why)
            return None

        def line(waited: float) -> str:
            return blocked(f"reader {self.rank}", waited, "not attached yet", self.writer())

        self.wait(ready, deadline, self.writer, stall_line=line)

    # Taking -----------------------------------------------------------------------------------

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self.transport.socket

    def receive(
        self, timeout: float | None, cancel: threading.Event | None, _lends: bool = False
    ) -> Any:
        return self.receive_by(NEVER if timeout is None else Deadline(timeout), cancel)

    def receive_by(self, deadline: Deadline, cancel: threading.Event | None) -> Any:
        """As `receive`, for a call that may have begun on another end."""
        if cancel is not None and not hasattr(cancel, "is_set"):
            raise InvalidType("cancel must be a threading.Event or None")
        try:
            while True:
                if self._generation == fork_generation() and not self._closing:
                    # No call from here on: neither another thread nor a handler comes between.
                    at, ahead = self._ahead_at, self._ahead
                    if at < self._ahead_end and (self._watch is None or self._is_shown):
                        value, ahead[at] = ahead[at], None
                        self._ahead_at, self._is_shown = at + 1, False
                        return value
                self._get_ahead(deadline, cancel)
        except BaseException:
            self._is_shown = False  # nobody returns it
            if self._watch is not None and self._ahead_at < self._ahead_end:
                self.nudge()  # to show that
            raise

    def _get_ahead(self, deadline: Deadline, cancel: threading.Event | None) -> None:
        """Waits for a message that can be returned, unless there is one; others may be ahead of it,
        if this is interrupted or another thread comes between."""
        with self.guard:
            was_awaited, self._is_awaited = self._is_awaited, False
            try:
                if self._ahead_at == self._ahead_end:
                    self._decode(deadline, cancel)
            finally:
                if self._watch is not None:
                    self._show_after_call(was_awaited, returns=1)
                    self._is_shown = True

    def _decode(self, deadline: Deadline, cancel: threading.Event | None) -> None:
        """Takes and decodes the next message and, unless somebody watches the descriptor, the small
        ones that have come behind it; so many that no acknowledgement is due before the last of
        them is returned. They are kept until they are decoded."""
        if not self._kept:
            self.take(deadline, cancel, keeps=True)
        with self.lock:
            self._take_kept()  # a handler may have raised while they were taken
            if self._watch is None and len(self._kept) == 1:
                self._kept = [*self._kept, *self.session.takeable()]
                self._take_kept()
        kept = self._kept
        try:
            values = [decode(kept[0], self._codec)]
        except MemoryError as error:
            raise no_memory() from error
        except Exception as error:
            if self._is_broken(kept[0], error):  # so it counts as read
                self._kept = kept[1:]
            raise
        raised = None
        for message in kept[1:]:
            try:
                values.append(decode(message, self._codec))
            except MemoryError:
                break
            except Exception as error:  # a broken one's is raised by the call that takes it
                raised = None if self._is_broken(message, error) else error
                break
        count = len(values)
        rest, sizes = kept[count:], [len(message.memory) for message in kept[:count]]
        # Together, with no call in between: a signal handler may raise after a call.
        self._ahead, self._ahead_at, self._ahead_end = values, 0, count
        self._ahead_bytes, self._kept = sizes, rest
        if raised is not None:
            raise raised

    def _is_broken(self, message: Message, error: Exception) -> bool:
        """Whether the message is at fault, and not a signal handler that raised while it was
        decoded. Others than small ones may run the application's code, so they count as broken."""
        if raised_by_handler(error.__traceback__):
            return False
        if message.kind not in SMALL_KINDS:
            return True
        try:
            decode(message, self._codec)
        except MemoryError:
            return False
        except Exception:
            return True
        return False

    def _take_kept(self) -> None:
        """With the lock held. What a signal handler interrupts can be called again."""
        if self._kept:
            self.session.take_before(self._kept[-1].sequence + 1, time.monotonic())

    @contextmanager
    def view(
        self, _owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> Iterator[Any]:
        """Messages from the network are private memory, so there is no lease to end."""
        yield self.receive(timeout, cancel)

    def block(
        self, _owner: object, _timeout: float | None, _cancel: threading.Event | None
    ) -> AbstractContextManager[memoryview]:
        raise WrongRole(
            "Only local readers can acquire_read: a remote reader has no chunks; use dequeue"
        )

    def take(self, deadline: Deadline, cancel: Asked | None, *, keeps: bool = False) -> Message:
        """The next message, not decoded; inside a call. It counts as taken from now on, and with
        `keeps` is this end's until it is decoded.

        Raises:
            TimedOut, Cancelled: nothing was taken.
            WriterClosed, WriterDied: everything that was sent, or came, was taken.
        """
        session = self.session
        with self.lock:
            if session.inbox or self._hear(until_whole=True):
                return self._next(keeps)
        self._waits += 1

        def ready() -> Message | None:
            if session.inbox or self._hear(until_whole=True):
                return self._next(keeps)
            self.check()
            self._check_writer()
            return None

        self._is_hearing = True
        try:
            return self.wait(ready, deadline, self.writer, cancel, self.stall_line)
        finally:
            self._is_hearing = False

    def _next(self, keeps: bool = False) -> Message:
        if keeps:  # before it is taken: a signal handler may raise at any call
            self._kept = [self.session.inbox[0]]
        message = self.session.take(time.monotonic())
        if self.session.out:
            self._flush()
        return message

    # The session and the transport --------------------------------------------------------------

    def _hear(self, *, until_whole: bool = False, most: int = -1) -> bool:
        """Receives what has arrived, with the lock held; is there a complete message? After `most`
        frames it wakes whoever waits instead of going on."""
        session, transport = self.session, self.transport
        if self._has_news:  # set by the thread, which has used the socket
            with suppress(BlockingIOError):
                os.eventfd_read(self._news)
            self._has_news = False
        if self._was_interrupted:
            transport.rest()
            session.greet(time.monotonic())  # requests the wanted frame again
        self._was_interrupted = True  # until this is over: a signal handler may raise anywhere
        while (part := transport.next_part()) is not None:
            if not session.receive_whole(part):
                payload = transport.rest()
                if part and (payload is None or len(payload)):  # an empty part voids the frame
                    try:
                        session.receive(part, payload, time.monotonic())
                    except CorruptMessage as error:
                        logger.warning("reader %d requests a frame again: %s", self.rank, error)
            most -= 1
            if most == 0:
                self.wake()
            if (until_whole and session.inbox) or most == 0:
                break
        self._was_interrupted = self._lacks_memory = False
        if session.out:
            self._flush()
        return bool(session.inbox)

    def _hear_all(self) -> None:
        try:
            self._hear()
        except MemoryError:  # the next call tries again, and raises it if that fails, too
            self._lacks_memory = True

    def _flush(self) -> None:
        """Sends what is due. A frame whose sending was interrupted is sent again."""
        out = self.session.out
        while out:
            if not self.transport.send(out[0]):
                out.clear()
                return
            out.popleft()

    def _tick(self) -> float | None:
        """Also acknowledges what was taken, because a waiting reader has nothing better to do."""
        session = self.session
        self._served_at = now = time.monotonic()
        self._hear(until_whole=self._is_hearing)  # a call takes one; more would only take memory
        later = session.acknowledge_later(now) if not session.inbox else None
        if self._connection is not None:
            session.note_silence(self._connection.is_silent(self.bound))
        due = session.tick(now)
        if session.out:
            self._flush()
        if session.failure is not None:  # the writer should notice, too
            self.transport.hang_up()
        return min((end for end in (due, later) if end is not None), default=None)

    def _check_writer(self) -> None:
        try:
            self.session.check_writer(self._ran_at)
        finally:
            self._flush()  # the writer waits for this confirmation

    def writer(self) -> str:
        return self.session.who(time.monotonic())

    def stall_line(self, waited: float) -> str | None:
        """What the log says of a long wait; nothing while connected, as the queue may be idle."""
        if self.session.is_connected:
            return None
        return blocked(f"reader {self.rank}", waited, "no new message", self.writer())

    # Watching -----------------------------------------------------------------------------------

    def watch(self) -> ShownWatch:
        """From now on the thread receives at once, unless a call does. What has come before is
        shown when this returns."""
        watch = self._new_watch()
        with self.locked() as is_free:
            self._is_selected = True
            if is_free and not self._is_hearing:
                self._show(_AT_ONCE)
            self.nudge()
        return watch

    def signal(self) -> JointWatch:
        """Without the thread: it would take two changes of threads more."""
        return JointWatch(
            self._new_watch(),
            _News(self.transport.news, self.hear_now),
            _News(self._news, bool),  # whose message the other hears
        )

    def hear_now(self) -> bool:
        """Receives what has arrived; would a call not wait? If it would, libzmq will signal, or
        there is more than an event loop should receive at once."""
        with suppress(Closed), self.locked():
            self._served_at = time.monotonic()
            self._listen(_AT_ONCE)
            if self._is_hearing:  # another thread's call, for which the signal was
                self.wake()
            return self._is_ready()
        return True

    def show_waiting(self, is_waiting: bool, is_first: bool) -> None:
        self._is_awaited = is_waiting
        if is_waiting:
            self.count_wait(is_first)
            with self.locked():
                if can_receive(self.transport.socket):
                    self.wake()
                self._watch.show(self._is_ready())  # type: ignore[union-attr]  # it is watched

    def count_wait(self, counts: bool) -> None:
        """Of a call that is awaited, if it counts."""
        self._waits += counts

    def timed_out(self, timeout: float | None) -> TimedOut:
        with self.locked():
            return timed_out(timeout, self.writer())

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around a call that receives, but takes no message."""
        with self.guard:
            try:
                yield
            finally:
                if self._watch is not None:
                    self._show_after_call(self._is_awaited)

    def _show_after_call(self, was_awaited: bool, returns: int = 0) -> None:
        """Shows whether another call would wait, after one that `returns` a message; wakes the
        thread if it is to look sooner."""
        with self.lock:
            if self._is_selected or was_awaited:
                ack_at = self._show(_AT_ONCE, returns)
            else:
                ack_at = self._acknowledge()
                self._watch.show(self._is_ready(returns))  # type: ignore[union-attr]  # it is watched
            is_late = ack_at is not None and ack_at < self._looks_at
            if is_late or (self._is_selected and (self._is_quiet or self._has_news)):
                self.nudge()

    def _show(self, most: int = -1, returns: int = 0) -> float | None:
        """Shows whether a call would not wait; returns when to acknowledge what was taken. Listens
        for that, as `_listen` says."""
        ack_at = self._acknowledge()
        self._listen(most)
        self._watch.show(self._is_ready(returns))  # type: ignore[union-attr]  # this end is watched
        return ack_at

    def _acknowledge(self) -> float | None:
        """What was taken, if that is due, and nothing else is to be taken; returns when it is."""
        session = self.session
        due = None if session.inbox else session.acknowledge_later(time.monotonic())
        if session.out:
            self._flush()
        return due

    def _listen(self, most: int = -1) -> None:
        """Receives until there is a message, or libzmq will signal the next frame; or until
        `most` frames were received, and then signals by itself."""
        try:
            while not (self.session.inbox or self._hear(until_whole=True, most=most)):
                if self._has_news or not can_receive(self.transport.socket):
                    break  # else sending has consumed the signal
        except MemoryError:  # the next call raises it
            self._lacks_memory = True

    def _is_ready(self, returns: int = 0) -> bool:
        session = self.session
        if session.is_behind:
            return False  # that is for the ring to say
        # Within a call it is being decoded, unless that was interrupted.
        is_kept = bool(self._kept) and (returns > 0 or self.guard.thread == 0)
        has_ended = session.is_ended or session.failure is not None
        is_ahead = self._ahead_end - self._ahead_at > max(returns, self._is_shown)
        has_more = bool(session.inbox) or is_kept or is_ahead or self._lacks_memory
        return has_more or has_ended or session.death(self._ran_at) is not None

    def statistics(self) -> QueueStatistics:
        """Lists this reader only: it knows nothing of the others."""
        taken = self.session
        with self.locked() as is_free:
            if is_free:
                self._take_kept()
            unread = [
                len(message.memory) for message in self._kept if message.sequence < taken.taken
            ]
            unread += self._ahead_bytes[self._ahead_at :]
            messages = taken.taken - taken.first - len(unread)
            nbytes = taken.bytes - sum(unread)
        own = ReaderStatistics(
            self.rank, os.getpid(), "running", 0, taken.last_progress, False, 0, None
        )
        return QueueStatistics(
            "reader",
            self.rank,
            os.getpid(),
            messages,
            nbytes,
            self._waits,
            0,
            (own,),
        )

    def wait_until_ready(self, timeout: float | None) -> None:
        self.wait_until_ready_by(Deadline(timeout))

    def wait_until_ready_by(self, deadline: Deadline) -> None:
        """Returns when the writer has said that everybody has attached."""
        session = self.session

        def missing() -> str:
            absent = session.absent
            if absent is None:
                return self.writer()
            unnamed = absent.beside + len(absent.places) - len(absent.names)
            return names_of(absent.names + ["another reader"] * unnamed)

        def ready() -> bool | None:
            self.check()
            if session.is_ready:
                return True
            self._check_writer()
            self._ask()
            return None

        def line(waited: float) -> str:
            reason = "not all readers have attached to the queue"
            return blocked(f"reader {self.rank}", waited, reason, missing())

        self._asked_at = 0.0
        with self._calling():
            self.wait(ready, deadline, missing, stall_line=line)

    def _ask(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= _ASK_AGAIN:
            self._asked_at = now
            self.session.ask()
            self._flush()

    # The thread -------------------------------------------------------------------------------

    def _delay_clocks(self, seconds: float, now: float) -> None:
        self.session.delay_clock(seconds, now)

    def _is_doubting(self) -> bool:
        return self.session.is_doubted

    def _serve(self) -> None:
        session = self.session
        with self.lock:
            self._hear_nudge()
            self._note_time()
            now = time.monotonic()
            is_quiet = self._lacks_memory or not self._must_listen(now)
            if self._note_events(now):
                self.wake()
            if not is_quiet:
                self._hear_all()
            session.follow(self._position_behind(), now)
        if session.was_cut:
            is_refused = is_deserted(self.endpoint)
            with self.lock:
                session.note_probe(is_refused, time.monotonic())
                self.wake()
        with self.lock:
            due = session.tick(now)
            self._flush()
            if session.failure is not None:
                self.transport.hang_up()
            ack_at = None if self._watch is None or self._is_hearing else self._show()
            # A call that sends may consume the signal of frames that arrived, so look again then.
            now = time.monotonic()
            ends = [now + self._recent, due, ack_at]
            self._looks_at = min(end for end in ends if end is not None)
            must_look = due is not None or not session.is_ended
            pause = max(0.0, self._looks_at - now) if must_look else None
            self._is_quiet = is_quiet
        self._sleep(self._quiet_poller if is_quiet else self._full_poller, pause)

    def _must_listen(self, now: float) -> bool:
        """Whether nobody else receives: no call, and no coroutine whose loop has just done so."""
        if self._is_hearing:
            return False
        return self._is_selected or now - self._served_at >= self._recent

    def _note_events(self, now: float) -> bool:
        """Handles connection events; were there any?"""
        session, is_any = self.session, False
        for event, value in self.transport.events():
            is_any = True
            if event == "accepted":
                with suppress(OSError):  # gone already: another event follows
                    self._connection = Connection(value, self.transport.spare)
                session.accept(now, self._events_at)
            elif event == "connected":
                session.connect(now)
            elif event == "lost":
                self._hear_all()  # what came over it: later, it would be of an old stream
                self._connection = None
                session.lose(now)
            elif event == "refused":
                session.refuse()
        self._events_at = now
        return is_any

    def wake(self) -> None:
        """Makes a call that is blocked in another thread look again."""
        with self.lock:
            if not self._closed:
                self._has_news = True
                os.eventfd_write(self._news, 1)

    def _drain(self) -> float:
        """Waits until the writer knows; a lost connection may be restored meanwhile."""
        session, now = self.session, time.monotonic()
        if session.has_left or not session.writer_pid:
            return 0.0
        if session.is_ended:
            self._flush()
            return _LAST_WORDS if session.is_connected else 0.0
        session.leave(now)
        patience = min(self.bound, _LAST_WORDS) if session.is_connected else self.bound
        deadline = Deadline(self._deadline.left(patience))

        def left() -> bool | None:
            self._note_events(time.monotonic())
            is_refused = session.was_cut and is_deserted(self.endpoint)
            session.note_probe(is_refused, time.monotonic())
            return True if session.has_left or session.is_over(self._ran_at) else None

        poller = self._poller(*self.transport.quiet, self.transport.news)
        poller.unregister(self._closing_event)
        with suppress(TimedOut):
            self.wait(left, deadline, str, poller=poller)
        return _LAST_WORDS if session.is_connected and not session.has_left else 0.0

    # Readers that share a host ------------------------------------------------------------------

    def hear(self) -> None:
        """Receives what the writer has sent; messages stay in the inbox."""
        with self.guard, self.lock:
            self._hear()

    def ask_who_is_absent(self) -> None:
        with self.locked():
            self._ask()

    def follow(self, position: Callable[[], int | None]) -> None:
        """The application reads from a relay's ring; `position` tells how far it is there, None
        once it does no longer."""
        self._position_behind = position

    def report(self, name: str, ring_id: str, rows: list[ReportRow]) -> None:
        """Reports on the readers of that ring. Lost without a connection, so callers repeat it."""
        with self.locked():
            self.session.report(name, ring_id, rows)
            self._flush()

    def attach_at(self, ring: Ring, rows: list[ReportRow], deadline: Deadline) -> bool:
        """Reports this reader in that ring, and waits until the writer knows; False: the ring's
        relay has ended."""
        said_at = 0.0

        def is_seen() -> bool:
            nonlocal said_at
            now = time.monotonic()
            if now - said_at >= _ASK_AGAIN:
                said_at = now
                self.session.report(ring.name, ring.ring_id, rows)
                self._flush()
            shown = self.session.ring
            return self.session.is_behind or shown is None or shown.name != ring.name

        with self.guard:
            self._until(is_seen, deadline)
        return self.session.is_behind

    def go_alone(self, taken: int, nbytes: int = 0) -> None:
        """Requests a stream of its own from message `taken` on; `nbytes` were taken before it."""
        with self._calling(), self.lock:
            with suppress(MemoryError):  # of a message that is asked for again
                self._hear()  # frames that came while it did not listen
            self.session.read_alone(taken, time.monotonic(), nbytes)
            self._flush()

    def until_welcome(self, deadline: Deadline) -> None:
        """Waits for WELCOME, or for something to take: the writer may have closed or died since."""
        s = self.session
        with self.guard:
            self._until(lambda: s.is_welcome or s.is_ended or bool(s.inbox), deadline)
