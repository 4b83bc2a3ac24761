"""A reader on another host than its writer, over a connection of its own."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import NEVER, Deadline
from memlane._base.diagnosis import blocked
from memlane._base.naming import names_of
from memlane._native import RingGeometry
from memlane._net.contexts import need_curve
from memlane._net.tcp import Connection
from memlane.broadcast.local import ViewBlock
from memlane.broadcast.network.ahead import Ahead
from memlane.broadcast.network.awaited import AwaitedMessage
from memlane.broadcast.network.driver import NetworkEnd, WakeUp, timed_out
from memlane.broadcast.network.incoming import Incoming
from memlane.broadcast.network.peer_table import PeerTable
from memlane.broadcast.network.transport import Connecting, is_deserted
from memlane.broadcast.protocol.reader_session import ReaderSession
from memlane.broadcast.statistics import QueueStatistics, ReaderStatistics
from memlane.errors import TimedOut, WriterUnreachable, WrongRole

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from memlane.broadcast.network.driver import Asked
    from memlane.broadcast.options import NetworkAddress
    from memlane.broadcast.protocol.frames import ReportRow, Ring
    from memlane.broadcast.protocol.message import Message
    from memlane.broadcast.watching import JointWatch


_ASK_AGAIN = 1.0
_RECENT = 0.5
"""Seconds without a call, or a quarter of the bound if that is less, after which the thread
receives, so that the writer can close meanwhile."""
_LAST_WORDS = 1.0  # seconds for the frames that a reader sends as it leaves


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
    geometry = None
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
        queue_id = bytes.fromhex(address.queue_id)
        table = PeerTable(RingGeometry(1, 0, 0), queue_id, address.label, is_writer=False)
        super().__init__(f"reader-{rank}", table)
        self.rank = rank
        self._position_behind: Callable[[], int | None] = lambda: None  # in its relay's ring
        self.bound = address.liveness
        self._recent = min(_RECENT, self.bound / 4)
        self._connection: Connection | None = None
        self._asked_at = 0.0
        self._events_at = time.monotonic()  # when connection events were last read
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
            pending = WakeUp(self._event())
            self.transport = Connecting(
                self._context, self.endpoint, address.server_key, secret, self.bound
            )
            self.socket = self.transport.socket
            self.incoming = Incoming(self, self.session, self.transport, pending, rank)
            self.ahead = Ahead(self, self.session, address.codec, self._refill)
            self.awaited = AwaitedMessage(
                self, self.session, self.incoming, self.ahead, self.socket
            )
            self.receive, self.watch = self.ahead.receive, self.awaited.watch
            self.show_waiting, self.hear_now = self.awaited.show_waiting, self.awaited.hear_now
            self._call_poller = self._poller(self.transport.readable, pending.descriptor)
            quiet = (*self.transport.quiet, self._waker.descriptor)
            self._quiet_poller = self._poller(*quiet)
            self._full_poller = self._poller(*quiet, self.transport.readable)
            self.transport.connect()
            self._start_thread()
            self._until(lambda: self.session.was_welcome, deadline)

    def _until(self, is_done: Callable[[], bool], deadline: Deadline) -> None:
        """Receives until `is_done`, as a step of attaching."""
        session = self.session

        def ready() -> bool | None:
            self.check()
            if session.connection.failure is not None:
                raise session.connection.failure
            if is_done():
                return True
            if (why := session.connection.death(self.ran_at)) is not None:
                raise WriterUnreachable(self.endpoint.text, why)
            return None

        def line(waited: float) -> str:
            return blocked(f"reader {self.rank}", waited, "not attached yet", self.writer())

        self.wait(ready, deadline, self.writer, stall_line=line)

    # Taking -----------------------------------------------------------------------------------

    def _refill(self, deadline: Deadline, cancel: threading.Event | None) -> None:
        """Waits for a message that can be returned, unless there is one; others may be ahead of it,
        if this is interrupted or another thread comes between."""
        ahead, awaited = self.ahead, self.awaited
        try:
            with self.guard:
                was_awaited = awaited.begin_call()
                try:
                    if ahead.is_empty:
                        if not ahead.keeps_any:
                            self.take(deadline, cancel, ahead.keep)
                        ahead.decode_kept()
                finally:
                    if awaited.end_call(was_awaited, returns=1):
                        ahead.note_shown()
        except BaseException:
            awaited.end_interrupted_call()
            raise

    def receive_many(
        self, timeout: float | None, cancel: threading.Event | None, lends: bool, _most: int
    ) -> list[Any]:
        return [self.receive(timeout, cancel, lends)]

    def view(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[Any]:
        return ViewBlock(owner, self, timeout, cancel)

    def __getitem__(self, how: tuple[float | None, threading.Event | None]) -> Any:
        """Messages from the network are private memory, so there is no lease to end."""
        return self.receive(how[0], how[1]), None

    def block(
        self, _owner: object, _timeout: float | None, _cancel: threading.Event | None
    ) -> AbstractContextManager[memoryview]:
        raise WrongRole(
            "Only local readers can acquire_read: a remote reader has no chunks; use dequeue"
        )

    def take(
        self,
        deadline: Deadline,
        cancel: Asked | None,
        keep: Callable[[Message], None] | None = None,
    ) -> Message:
        """Returns the next message, not decoded; inside a call. It counts as taken from now on;
        `keep` gets it before that.

        Raises:
            TimedOut, Cancelled: nothing was taken.
            WriterClosed, WriterDied: everything that was sent, or came, was taken.
        """
        session, incoming = self.session, self.incoming
        with self.lock:
            if session.inbox or incoming.receive(until_whole=True):
                return self._next(keep)
        incoming.count_wait(True)

        def ready() -> Message | None:
            if session.inbox or incoming.receive(until_whole=True):
                return self._next(keep)
            self.check()
            self._check_writer()
            return None

        incoming.note_call(True)
        self.show_wait("waiting")
        try:
            return self.wait(ready, deadline, self.writer, cancel, self.stall_line)
        finally:
            self.show_wait("elsewhere")
            incoming.note_call(False)

    def _next(self, keep: Callable[[Message], None] | None) -> Message:
        if keep is not None:
            keep(self.session.inbox[0])
        message = self.session.take(time.monotonic())
        if self.session.out:
            self.incoming.flush()
        return message

    # The session and the transport --------------------------------------------------------------

    def _tick(self) -> float | None:
        """Acknowledges what was taken, too: a waiting reader has the time."""
        session, incoming = self.session, self.incoming
        now = incoming.note_served()
        self._show(now)
        incoming.receive(until_whole=incoming.is_called)  # a call takes one; more only take memory
        later = incoming.acknowledge(now)
        if self._connection is not None:
            session.connection.note_silence(self._connection.is_silent(self.bound))
        due = session.tick(now)
        incoming.flush()
        if session.connection.failure is not None:  # the writer should notice, too
            self.transport.hang_up()
        return min((end for end in (due, later) if end is not None), default=None)

    def _show(self, now: float) -> None:
        """Shows observers the writer and this reader, unless both have a row in a relay's ring."""
        table, session = self.table, self.session
        if not table.is_due(now) or self._closed:
            return
        if session.is_behind:
            table.close()
            return
        table.show_absent(session.count_absent)
        table.show_peer(0, session.facts(now), None, session.taken, session.first, now)
        table.show_own(1, session.taken, session.bytes, self.incoming.waits, now, rank=self.rank)
        table.rest(now)

    def _check_writer(self) -> None:
        try:
            self.session.check_writer(self.ran_at)
        finally:
            self.incoming.flush()  # the writer waits for this confirmation

    def writer(self) -> str:
        return self.session.who(time.monotonic())

    def stall_line(self, waited: float) -> str | None:
        """Returns the log's line about a long wait; None while connected: the queue may be idle."""
        if self.session.connection.is_connected:
            return None
        return blocked(f"reader {self.rank}", waited, "no new message", self.writer(), self.label)

    def timed_out(self, timeout: float | None) -> TimedOut:
        with self.locked():
            return timed_out(timeout, self.writer(), self.label)

    def signal(self) -> JointWatch:
        return self.awaited.signal(self.transport.readable)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """Around a call that receives, but takes no message."""
        with self.guard:
            try:
                yield
            finally:
                self.awaited.end_call(self.awaited.is_awaited)

    def statistics(self) -> QueueStatistics:
        """Lists this reader only: it knows nothing of the others."""
        taken = self.session
        with self.locked() as is_free:
            unread = self.ahead.unread(settles=is_free)
            messages = taken.taken - taken.first - len(unread)
            nbytes = taken.bytes - sum(unread)
        pid, waits = os.getpid(), self.incoming.waits
        own = ReaderStatistics(self.rank, pid, "running", 0, taken.last_progress, False, 0, None)
        return QueueStatistics("reader", self.rank, pid, messages, nbytes, waits, 0, (own,))

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
            return blocked(f"reader {self.rank}", waited, reason, missing(), self.label)

        self._asked_at = 0.0
        self.show_wait("attaching")
        try:
            with self._calling():
                self.wait(ready, deadline, missing, stall_line=line)
        finally:
            self.show_wait("elsewhere")

    def _ask(self) -> None:
        now = time.monotonic()
        if now - self._asked_at >= _ASK_AGAIN:
            self._asked_at = now
            self.session.ask()
            self.incoming.flush()

    # The thread -------------------------------------------------------------------------------

    def _delay_clocks(self, seconds: float, now: float) -> None:
        self.session.connection.delay_clock(seconds, now)

    def _is_doubting(self) -> bool:
        return self.session.connection.is_doubted

    def _serve(self) -> None:
        session, incoming = self.session, self.incoming
        with self.lock:
            self._waker.clear()
            self._note_time()
            now = time.monotonic()
            is_quiet = incoming.lacks_memory or not self._must_listen(now)
            if self._note_events(now):
                incoming.wake()
            if not is_quiet:
                incoming.receive_all()
            session.follow(self._position_behind(), now)
            self._show(now)
        if session.connection.was_cut:
            is_refused = is_deserted(self.endpoint)
            with self.lock:
                session.connection.note_probe(is_refused, time.monotonic())
                incoming.wake()
        with self.lock:
            due = session.tick(now)
            incoming.flush()
            if session.connection.failure is not None:
                self.transport.hang_up()
            ack_at = None if self.shown is None or incoming.is_called else self.awaited.show()
            # A call that sends may consume the signal of frames that arrived, so look again then.
            now = time.monotonic()
            ends = [now + self._recent, due, ack_at]
            looks_at = min(end for end in ends if end is not None)
            must_look = due is not None or not session.is_ended
            pause = max(0.0, looks_at - now) if must_look else None
            self.awaited.note_sleep(is_quiet, looks_at)
        self._sleep(self._quiet_poller if is_quiet else self._full_poller, pause)

    def _must_listen(self, now: float) -> bool:
        """Returns whether nobody else receives: no call, and no coroutine whose loop has just done
        so."""
        if self.incoming.is_called:
            return False
        return self.awaited.is_selected or now - self.incoming.served_at >= self._recent

    def _note_events(self, now: float) -> bool:
        """Handles connection events; returns whether there were any."""
        session, is_any = self.session, False
        for event, value in self.transport.events():
            is_any = True
            if event == "accepted":
                with suppress(OSError):  # gone already: another event follows
                    self._connection = Connection(value, self.transport.spare)
                session.connection.accept(now, self._events_at)
            elif event == "connected":
                session.connect(now)
            elif event == "lost":
                self.incoming.receive_all()  # later, it would be of an old stream
                self._connection = None
                session.lose(now)
            elif event == "refused":
                session.connection.refuse()
        self._events_at = now
        return is_any

    def _drain(self) -> float:
        """Waits until the writer knows; a lost connection may be restored meanwhile."""
        session, now = self.session, time.monotonic()
        if session.has_left or not session.writer_pid:
            return 0.0
        if session.is_ended:
            self.incoming.flush()
            return _LAST_WORDS if session.connection.is_connected else 0.0
        session.leave(now)
        patience = min(self.bound, _LAST_WORDS) if session.connection.is_connected else self.bound
        deadline = Deadline(self._deadline.left(patience))

        def left() -> bool | None:
            self._note_events(time.monotonic())
            is_refused = session.connection.was_cut and is_deserted(self.endpoint)
            session.connection.note_probe(is_refused, time.monotonic())
            return True if session.has_left or session.is_over(self.ran_at) else None

        poller = self._poller(*self.transport.quiet, self.transport.readable)
        poller.unregister(self._closing_event)
        with suppress(TimedOut):
            self.wait(left, deadline, str, poller=poller)
        return _LAST_WORDS if session.connection.is_connected and not session.has_left else 0.0

    # Readers that share a host ------------------------------------------------------------------

    def hear(self) -> None:
        """Receives what the writer has sent; messages stay in the inbox."""
        with self.guard, self.lock:
            self.incoming.receive()

    def ask_who_is_absent(self) -> None:
        with self.locked():
            self._ask()

    def follow(self, position: Callable[[], int | None]) -> None:
        """Notes that the application reads from a relay's ring; `position` returns how far it is
        there, None once it does no longer."""
        self._position_behind = position

    def report(self, name: str, ring_id: str, rows: list[ReportRow]) -> None:
        """Reports on the readers of that ring. Lost without a connection, so callers repeat it."""
        with self.locked():
            self.session.report(name, ring_id, rows)
            self.incoming.flush()

    def attach_at(self, ring: Ring, rows: list[ReportRow], deadline: Deadline) -> bool:
        """Reports this reader in that ring, and waits until the writer knows. Returns False if the
        ring's relay has ended."""
        said_at = 0.0

        def is_seen() -> bool:
            nonlocal said_at
            now = time.monotonic()
            if now - said_at >= _ASK_AGAIN:
                said_at = now
                self.session.report(ring.name, ring.ring_id, rows)
                self.incoming.flush()
            shown = self.session.ring
            return self.session.is_behind or shown is None or shown.name != ring.name

        with self.guard:
            self._until(is_seen, deadline)
        return self.session.is_behind

    def go_alone(self, taken: int, nbytes: int = 0) -> None:
        """Requests a stream of its own from message `taken` on; `nbytes` were taken before it."""
        with self._calling(), self.lock:
            with suppress(MemoryError):  # of a message that is asked for again
                self.incoming.receive()  # frames that came while it did not listen
            self.session.read_alone(taken, time.monotonic(), nbytes)
            self.incoming.flush()

    def until_welcome(self, deadline: Deadline) -> None:
        """Waits for WELCOME, or for something to take: the writer may have closed or died since."""
        s = self.session
        with self.guard:
            self._until(lambda: s.is_welcome or s.is_ended or bool(s.inbox), deadline)
