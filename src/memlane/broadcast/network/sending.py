"""The messages that a writer sends: how many may be sent now, which wait for company, and which was
begun."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from memlane._base.deadline import NEVER, Deadline
from memlane._native import Encoder, FrameBatch, after_return
from memlane.broadcast.protocol.frames import PIECE, SMALL, Kind, whole_header
from memlane.broadcast.protocol.outbox import Piece, piece_of, pieces_of, raw_piece
from memlane.broadcast.watching import NOW
from memlane.errors import MemlaneError, Unsupported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from memlane._base.guard import Guard
    from memlane._base.serialization import Codec
    from memlane._locks import Lock
    from memlane.broadcast.local import LocalWriter
    from memlane.broadcast.network.transport import Listening
    from memlane.broadcast.protocol.writer_session import Due, WriterSession

UNREAD = 1 << 20  # bytes: half of what a reader takes at most before it acknowledges


class SendingEnd(Protocol):
    """The methods of a writer's end that sending uses."""

    guard: Guard
    lock: Lock
    is_closing: bool

    def check(self) -> None: ...
    def is_set(self) -> bool: ...
    def is_recent(self) -> bool:
        """Returns whether readers' frames were read a moment ago."""

    def look(self, *, is_late: bool) -> None:
        """Reads readers' frames, and looks for connections that flood if that is late."""

    def wait_for_room(self, size: int, deadline: Deadline) -> None: ...
    def send_batch(self) -> None:
        """Calls that of `Sending`, unless the end is closed."""


class Sending:
    """Sends one writer's messages to its remote readers, behind the ring of its own host.

    Attributes:
        batch: small messages that wait for each other.
        wanted: bytes of the message that is awaited.
        waits: number of calls that had to wait for a window.
    """

    has_sent = False  # `send` itself knows

    def __init__(
        self,
        end: SendingEnd,
        session: WriterSession,
        transport: Listening,
        local: LocalWriter | None,
        codec: Codec,
    ) -> None:
        self._end, self._session, self._transport, self._local = end, session, transport, local
        self._outbox = session.outbox
        self._encoder = Encoder(codec)
        self.batch = FrameBatch(codec, whole_header(session.epoch, 0, 0, 0), SMALL)
        self.wanted = self.waits = 0
        self._was_interrupted = False  # a signal handler has interrupted sending or receiving
        self._is_receiving = False  # receiving, so a reader's frame may have been lost
        self._stages = False  # the call that is under way has staged a message
        self._unread = 0  # bytes sent since readers' frames were last read
        self._credit = 0  # messages that may be sent without another look
        self._room = -1  # the same in bytes, -1: none

    # Calls ------------------------------------------------------------------------------------

    def send(self, obj: Any, timeout: float | None) -> None:
        deadline = NEVER if timeout is None else Deadline(timeout)
        before: int | None = None
        try:
            if (is_due := self.batch.put(obj)) is not None:
                if is_due:
                    self._end.send_batch()
                return
            with self._end.guard:
                self.begin()
                before = self._sent()
                self._send_alone(obj, timeout, deadline)
        except MemlaneError:
            raise
        except BaseException as error:  # of a signal handler, perhaps after the message was sent
            if not self.batch.has_put and (before is None or self._sent() == before):
                raise
            after_return.error = error  # no call, after which another handler could run

    def _sent(self) -> int:
        """A number that grows with the message: what is staged is settled by the ring's."""
        return self._outbox.next if self._local is None else self._local.position

    def _send_alone(self, obj: Any, timeout: float | None, deadline: Deadline) -> None:
        encoder, session = self._encoder, self._session
        try:
            size = encoder.encode(obj)
            if timeout is NOW:
                self.wanted = size
            if encoder.kind != Kind.PLAIN:
                self._end.check()  # pickling may have forked
            if size <= PIECE and size <= self._room and self._local is None:
                self._publish_alone(size)
                return
            must_wait = size > self._room and self._reserve(size, deadline)
            has_waited = must_wait and timeout != 0
            # Whatever may fail happens before the ring publishes.
            self._stage(pieces_of(encoder, session.epoch, self._outbox.next, size), size)
            if self._local is not None:
                left = deadline.left() if has_waited else timeout
                self._local.native.send_encoded(encoder, left, self._end)
            self._publish()
        finally:
            encoder.clear()

    def block(self, owner: object, timeout: float | None) -> AbstractContextManager[memoryview]:
        """Remote readers do not get the raw bytes; they raise `CorruptMessage` instead."""
        if self._local is None:
            raise Unsupported(
                "acquire_write needs a reader on this host: those of this queue are all on others, "
                "which get no raw chunks; use enqueue"
            )
        return self._block(self._local, owner, timeout)

    @contextmanager
    def _block(
        self, local: LocalWriter, owner: object, timeout: float | None
    ) -> Iterator[memoryview]:
        deadline = Deadline(timeout)
        with self._end.guard:
            self.begin()
            self._reserve(0, deadline)
            self._stage(raw_piece(self._session.epoch, self._outbox.next), 0)
            with local.native.write_block(owner, deadline.left()) as view:
                yield view
            self._publish()

    def _reserve(self, size: int, deadline: Deadline) -> bool:
        """Waits until `size` more bytes fit every reader's window. Returns whether it had to wait.

        Raises:
            ReaderDied: a reader died.
            TimedOut: names the readers that are behind.
        """
        with self._end.lock:
            if self._session.has_room(size):
                return False
        self.waits += 1
        self._end.wait_for_room(size, deadline)
        return True

    def begin(self) -> None:
        """Begins a call that sends. Until it has ended, nothing else gets a sequence."""
        with self._end.lock:  # or another thread might be about to open the batch
            has_batch = self.batch.shut()
            if self._was_interrupted or self._stages:
                self._was_interrupted = True  # a signal handler may raise before recover() is over
                self._stages = False
                self.recover()
            elif has_batch:
                self.flush()

    # Messages ---------------------------------------------------------------------------------

    @property
    def position(self) -> int:
        """The local ring's position; it shows whether a message was interrupted."""
        return 0 if self._local is None else self._local.position

    def _stage(self, pieces: Sequence[Piece], size: int) -> None:
        """Stages the next message, before the ring gets it."""
        with self._end.lock:
            self._stages = True
            self._outbox.stage(size, pieces, self.position)

    def _publish(self) -> None:
        """Hands the staged message over to every reader that has a stream."""
        with self._end.lock:
            self._was_interrupted = True  # until this is over: a signal handler may raise anywhere
            size = self._outbox.commit()
            self.flush()
            self._was_interrupted = self._stages = False
            self._settle(1, size)

    def _publish_alone(self, size: int) -> None:
        """Fast path of `_stage` and `_publish` for a message in one piece that fits `_room`."""
        with self._end.lock:
            session = self._session
            piece = piece_of(self._encoder, session.epoch, self._outbox.next, size)
            self._was_interrupted = True
            self._send(session.publish_alone(piece, size))
            self._was_interrupted = False
            self._settle(1, size)

    def send_batch(self) -> None:
        """Hands the messages that wait for each other over, with the lock held. Beside another
        call, that goes on."""
        self.recover()
        self.flush()
        self._settle(0, 0)

    def take_batch(self) -> None:
        """Makes the messages that wait for each other the newest, with the lock held. What a
        signal handler interrupts can be called again."""
        batch = self.batch
        if batch.shut():
            count, size = batch.count, batch.nbytes
            self._outbox.append_batch(batch.first, batch.frame(), size, count)
            self._count(count, size)
            batch.clear()

    def _count(self, count: int, size: int) -> None:
        self._credit -= count
        self._room -= size
        self._unread += size

    def forget_room(self) -> None:
        """Makes the next call look how much room there is: a reader has come or gone."""
        self._room = -1

    def _settle(self, count: int, size: int) -> None:
        """Accounts for sent messages. Readers' frames can wait until room is short, unless the
        thread sleeps: sending may have consumed the signal that it sleeps for."""
        self._count(count, size)
        is_recent = self._unread < UNREAD and self._end.is_recent()
        if self._credit <= 0 or self._room < 0 or not is_recent:
            self._unread = 0
            self._end.look(is_late=not is_recent)
            self._credit, self._room = self._session.room()
        is_free = self._end.guard.thread in (0, threading.get_ident())
        if self._local is None and is_free and not self._end.is_closing:
            room = min(self._room, UNREAD - self._unread)
            self.batch.open(self._outbox.next, self._credit, room)

    # Frames -----------------------------------------------------------------------------------

    def flush(self) -> None:
        """Sends what is due. A frame whose sending was interrupted is sent again."""
        session, unwanted = self._session, self._session.replies.unwanted
        before, self._was_interrupted = self._was_interrupted, True
        self.take_batch()
        self._send(session.frames_due())
        self.batch.rest()
        while unwanted:
            self._transport.shut(unwanted[0])
            unwanted.popleft()
        self._was_interrupted = before

    def _send(self, due: Iterable[Due]) -> None:
        session, send = self._session, self._transport.send
        for route, piece, peer, cursor in due:
            if send(route, *piece) or peer is None:
                session.sent(peer, cursor)
            else:
                session.unsent(peer, time.monotonic())

    def begin_receiving(self) -> None:
        """Before readers' frames are read: what is interrupted until `end_receiving` is repaired
        by `recover`."""
        self.recover()
        self.take_batch()  # a reader that comes late gets what is sent from now on
        self._was_interrupted = self._is_receiving = True

    def end_receiving(self) -> None:
        self.flush()
        self._was_interrupted = self._is_receiving = False

    def recover(self) -> None:
        """Recovers if a signal handler has raised while a message was sent or frames were read."""
        with self._end.lock:
            is_on_its_way = self._stages and self._end.guard.thread != 0
            if self._outbox.staged is not None and not is_on_its_way:
                self._was_interrupted = True
                self._outbox.settle(self.position)
            if self._was_interrupted:
                self._room = -1  # what was sent may not have been counted
                self._transport.repair()
                if self._is_receiving:
                    self._session.say_again()
                self._is_receiving = False
                self.flush()
                self._was_interrupted = False
