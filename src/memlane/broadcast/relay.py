"""One stream of messages for all readers of a host: received once, passed on through a ring.

The relay is a thread in the process of one of those readers. It takes messages from the network as
they are, undecoded, and puts them into a ring of its own, in this host's memory, from which all
readers of the host read, that one included. It acknowledges nothing itself: it tells the writer,
for each reader behind it, who it is, whether it lives, and what it has taken. So the writer's
window covers the whole way, and whoever lags or dies is named by the writer as if it was connected
itself.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import closing, suppress
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

import zmq

from memlane._failures import participant
from memlane._native import Encoder, Outgoing
from memlane._segments import new_id
from memlane._serialization import codec_of
from memlane.broadcast.ends import LocalReader, LocalWriter
from memlane.broadcast.handle import Handle
from memlane.broadcast.remote.end import deadline_of, remaining
from memlane.broadcast.remote.joining import attach
from memlane.broadcast.remote.message import Message, split
from memlane.broadcast.remote.reader import ACK_DELAY, RemoteReader
from memlane.broadcast.remote.wire import Header, Kind, Report, ReportRow, What, control
from memlane.broadcast.ring import ring_geometry
from memlane.errors import (
    Closed,
    CorruptMessage,
    ReaderDied,
    TimedOut,
    WriterClosed,
    WriterDied,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from memlane.broadcast.statistics import QueueStatistics

logger = logging.getLogger("memlane")

# So often it is looked how far the readers are while so many messages are on their way that the
# writer may wait for room (while there are fewer: every ACK_DELAY), and whether they live.
_HURRY = 0.002
_LOOK = 0.25
# The writer is told again now and then, in case the connection was lost meanwhile.
_REPEAT = 1.0
_ROWS = 64  # of a report that fits a frame of a reader
_KEEP_BYTES = 256 * 1024 * 1024


class _Stream(RemoteReader):
    """Takes messages, and leaves it to the relay to say what was read."""

    def _acknowledge(self) -> None:
        self._acked, self._unacked_bytes = self._taken, 0

    @property
    def many(self) -> int:
        """So many messages on their way are a quarter of the writer's window."""
        return self._ack_messages

    def report(self, rows: list[ReportRow]) -> None:
        with self._lock, suppress(zmq.Again):  # without a connection; it is told again
            for first in range(0, len(rows), _ROWS):
                body = Report(rows[first : first + _ROWS])
                self.socket.send(control(Header(What.REPORT, self._epoch), body), zmq.DONTWAIT)


class _Passing:
    """A codec for an `Encoder` whose object is a message that was encoded long ago."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.message = Message(0, Kind.RAW, b"")

    def encode_plain(self, _plain: object) -> bytes:
        return bytes(self.message.memory)

    def encode(self, _other: object) -> None:
        if self.message.kind == Kind.OBJECT:
            self.outgoing.write(self.message.memory)
            return
        stream, buffers = split(memoryview(self.message.memory))
        self.outgoing.write(stream)
        for buffer in buffers:
            self.outgoing.add_buffer(PickleBuffer(buffer))  # type: ignore[arg-type]


class Relay:
    """Receives for `ranks`, of which `rank` is in this process. Fails whole."""

    def __init__(
        self, handle: Handle, rank: int, ranks: list[int], max_chunk_bytes: int, max_chunks: int
    ) -> None:
        geometry = ring_geometry(len(ranks), max_chunk_bytes, max_chunks)
        queue_id = new_id()
        self.geometry = geometry
        self.ring = LocalWriter(geometry, queue_id, ranks, codec_of(handle.serializer), _KEEP_BYTES)
        try:
            self.ring.native.set_absent_elsewhere(1)
            self.stream = attach(handle, rank, _Stream)
        except BaseException:
            self.ring.abandon()
            raise
        name = self.ring.segment.name
        self.handle = Handle(
            local_reader_ranks=list(ranks),
            buffer_handle=(len(ranks), max_chunk_bytes, max_chunks, name),
            queue_id=queue_id.hex(),
            serializer=handle.serializer,
        )
        self._ranks = ranks
        self._codec = _Passing()
        self._encoder = Encoder(self._codec)
        self._dead: set[int] = set()
        self._told: list[ReportRow] = []
        self._told_at = 0.0
        self._is_orphan = False  # the reader in this process has closed
        self._thread = threading.Thread(target=self._run, name=f"memlane-relay-{rank}", daemon=True)

    def start(self, timeout: float | None) -> None:
        """Returns when the whole queue is ready; from then on messages are passed on."""
        deadline = deadline_of(timeout)
        if self._thread.ident is not None:
            return
        self._report()
        self.stream.wait_until_ready(timeout)
        self.ring.native.set_absent_elsewhere(0)
        self.ring.wait_until_ready(remaining(deadline))
        self._thread.start()

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._pass_on()
        except WriterClosed:
            self._close()
        except Closed:
            self.abandon()
        except WriterDied as error:
            logger.warning("%s; its readers on this host hear of it from their relay", error)
            self.abandon()
        except BaseException:  # nobody else would ever hear of it
            logger.exception("a relay failed")
            self.abandon()

    def _pass_on(self) -> None:
        while not (self._is_orphan and not self._is_anybody_reading()):
            behind = self._report()
            pause = _LOOK
            if behind:
                pause = _HURRY if behind >= self.stream.many else ACK_DELAY
            try:
                with self.stream:
                    message = self.stream.take(pause, None, deadline_of(pause))
            except TimedOut:
                continue
            except CorruptMessage as error:
                logger.warning("a relay was sent a frame that it asks for again: %s", error)
                continue
            self._put(message)
        self._close()

    def _close(self) -> None:
        """The readers get what is in the ring, then `Closed`."""
        with closing(self.stream):
            self.ring.close()

    def _put(self, message: Message) -> None:
        """Into the ring; meanwhile the writer is kept informed, because this may last."""
        native, encoder = self.ring.native, self._encoder
        try:
            if self._encode(message):
                self._until_done(lambda: native.send_encoded(encoder, ACK_DELAY, None))
            else:  # what is not an object; its readers raise CorruptMessage, each once
                self._until_done(lambda: native.begin_write(ACK_DELAY))
                native.end_write(True)
        finally:
            encoder.clear()

    def _encode(self, message: Message) -> bool:
        """Has the encoder hold the message's bytes as if it had made them."""
        self._codec.message = message
        match message.kind:
            case Kind.PLAIN:
                self._encoder.encode({})
            case Kind.OBJECT | Kind.FRAMES:
                with suppress(CorruptMessage):
                    self._encoder.encode(object)
                    return True
                return False
            case Kind.BYTES:
                self._encoder.encode(bytes(message.memory))
            case _:
                return False
        return True

    def _until_done(self, call: Callable[[], object]) -> None:
        while True:
            try:
                call()
                return
            except TimedOut:
                self._report()
            except ReaderDied as error:
                self._let_go(error.rank)
                self._report()

    def _let_go(self, rank: int) -> None:
        """The writer decides what becomes of the queue; the others here go on."""
        if rank not in self._dead:
            self._dead.add(rank)
            self.ring.native.release_reader(self._ranks.index(rank))

    def _report(self) -> int:
        """Tells the writer what is new; how many messages the last reader has still to take."""
        native = self.ring.native
        rows, behind = [], 0
        for slot, rank in enumerate(self._ranks, start=1):
            who = participant(native, slot)
            if who.state == "dead":
                self._let_go(rank)
            state = "dead" if rank in self._dead else who.state
            rows.append(ReportRow(rank, who.pid, state, who.position))
            if state not in ("dead", "closed"):
                behind = max(behind, native.position - who.position)
        now = time.monotonic()
        if rows != self._told or now - self._told_at >= _REPEAT:
            self._told, self._told_at = rows, now
            self.stream.report(rows)
        return behind

    def _is_anybody_reading(self) -> bool:
        return any(row.state not in ("dead", "closed", "absent") for row in self._told)

    # The end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """The reader in this process has closed; the relay ends with the last of the others."""
        self._is_orphan = True
        if self._thread.ident is None:
            self._close()

    def abandon(self) -> None:
        """Ends at once; to the readers, and to the writer, it looks like a death."""
        self.ring.abandon()
        self.stream.abandon()


def relaying_reader(
    handle: Handle, rank: int, ranks: list[int], max_chunk_bytes: int, max_chunks: int
) -> RelayingReader:
    """Reader `rank` of the handle's queue, relaying to `ranks`. Fails whole."""
    relay = Relay(handle, rank, ranks, max_chunk_bytes, max_chunks)
    try:
        return RelayingReader(relay, rank)
    except BaseException:
        relay.abandon()
        raise


class RelayingReader:
    """The reader in whose process the relay runs; it reads from the ring like the others."""

    def __init__(self, relay: Relay, rank: int) -> None:
        self._relay = relay
        self._own = LocalReader(relay.geometry, relay.ring.segment.name, relay.handle, rank)
        self.rank = rank
        self.handle = relay.handle
        self.geometry = relay.geometry
        self.segment = self._own.segment
        self.receive = self._own.receive
        self.check = self._own.check

    @property
    def position(self) -> int:
        return self._own.position

    @property
    def place(self) -> int:
        return self._own.place

    @property
    def socket(self) -> zmq.Socket[bytes]:
        return self._relay.stream.socket

    def wait_until_ready(self, timeout: float | None) -> None:
        deadline = deadline_of(timeout)
        self._relay.start(timeout)
        self._own.wait_until_ready(remaining(deadline))

    def statistics(self) -> QueueStatistics:
        return self._own.statistics()

    def view(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[Any]:
        return self._own.view(owner, timeout, cancel)

    def block(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[memoryview]:
        return self._own.block(owner, timeout, cancel)

    def close(self) -> None:
        try:
            self._own.close()
        finally:
            self._relay.leave()

    def abandon(self) -> None:
        self._own.abandon()
        self._relay.abandon()
