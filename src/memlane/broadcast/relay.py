"""One stream of messages for all readers of a host: received once, passed on through a ring.

The relay is a thread in the process of one of those readers. It takes messages from the network as
they are, undecoded, and puts them into a ring of its own, in this host's memory, from which all
readers of the host read, that one included. It acknowledges nothing itself: it tells the writer,
for each reader behind it, who it is, whether it lives, and what it has taken. So the writer's
window covers the whole way, and whoever lags or dies is named by the writer as if it was connected
itself. Who relays, the writer decides (`remote/relaying.py`). When a relay ends, those behind it
find its ring dead, and go on by connections of their own, which they have kept for that. If it ends
because it cannot go on, for want of memory here, its own reader goes on so, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import ExitStack, closing, suppress
from pickle import PickleBuffer
from typing import TYPE_CHECKING

from memlane import _threads
from memlane._deadlines import deadline_of
from memlane._failures import participant
from memlane._native import Encoder, Outgoing
from memlane._segments import new_id
from memlane._serialization import codec_of
from memlane._undo import undone_by
from memlane.broadcast.ends import LocalWriter
from memlane.broadcast.handle import Handle
from memlane.broadcast.remote.frames import Absent, Kind, ReportRow, Ring
from memlane.broadcast.remote.message import Message, split
from memlane.broadcast.remote.reader_session import ACK_DELAY
from memlane.broadcast.ring import ring_geometry
from memlane.errors import (
    Cancelled,
    Closed,
    CorruptMessage,
    PeerDied,
    ReaderDied,
    SystemFault,
    TimedOut,
    WriterClosed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane.broadcast.remote.reader import RemoteReader

logger = logging.getLogger("memlane")

# Seconds between two looks whether the readers live. Progress is reported like that of a connected
# reader: after a quarter of the window, after ACK_DELAY, and at once if the writer waits for it.
_LOOK = 0.25
# The writer is told, and asked, again now and then, in case the connection was lost meanwhile.
_REPEAT = 1.0
_LAST_WORDS = 2.0  # seconds for saying goodbye, before the process may end
_KEEP_BYTES = 256 * 1024 * 1024


def ring_handle(handle: Handle, ring: Ring, writer_pid: int) -> Handle:
    return Handle(
        local_reader_ranks=ring.ranks,
        buffer_handle=(len(ring.ranks), ring.max_chunk_bytes, ring.max_chunks, ring.name),
        queue_id=ring.ring_id,
        serializer=handle.serializer,
        relay_of=(writer_pid, handle.remote_subscribe_addr or ""),
    )


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
    """Makes the ring that the writer has asked for, and fills it. Fails whole.

    The stream stays the caller's until `start`.
    """

    def __init__(self, stream: RemoteReader, handle: Handle, plan: Ring) -> None:
        geometry = ring_geometry(len(plan.ranks), plan.max_chunk_bytes, plan.max_chunks)
        ring_id = new_id()
        codec = codec_of(handle.serializer)
        self.ring = LocalWriter(geometry, ring_id, plan.ranks, codec, _KEEP_BYTES)
        self.stream = stream
        self._plan = Ring(
            plan.place,
            plan.ranks,
            plan.max_chunk_bytes,
            plan.max_chunks,
            self.ring.segment.name,
            ring_id.hex(),
        )
        self.handle = ring_handle(handle, self._plan, stream.session.writer_pid)
        self._places = list(range(len(plan.ranks)))  # of readers here, or still to come
        self._dead: set[int] = set()
        self._sizes: deque[int] = deque()  # of the messages that somebody has still to read
        self._unread_bytes = 0
        self._behind = 0  # messages that the last reader has still to take, as of the last report
        self._unreported = 0  # messages since then, and their bytes
        self._unreported_bytes = 0
        self._report_at = 0.0
        self._told: list[ReportRow] | None = None
        self._told_at = 0.0
        self._heard: Absent | None = None  # the latest answer that was acted upon
        self._has_name = True
        self._pid = os.getpid()
        self._is_orphan = False  # the reader in this process has closed
        self.has_failed = False  # the stream is that reader's own from now on
        self._leaving = threading.Event()  # it does so now
        self._has_told = threading.Event()  # and the writer was told
        self._codec = _Passing()
        self._encoder = Encoder(self._codec)
        self._thread = threading.Thread(
            target=self._run, name=f"memlane-relay-{stream.rank}", daemon=True
        )
        self.ring.native.set_absent_elsewhere(1)  # nobody is ready before the writer says so

    def start(self) -> None:
        """From now on readers may come, and messages are passed on."""
        self._report()
        _threads.start(self._thread)

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._pass_on()
        except WriterClosed:
            self._close()
        except Closed:
            self.abandon()
        except PeerDied as error:
            logger.warning("%s; the readers behind this relay go on by themselves", error)
            self.abandon()
        except (MemoryError, SystemFault) as error:
            self._fail()
            logger.warning("%r; the readers behind this relay go on by themselves", error)
        except BaseException:  # nobody else would ever hear of it
            self._fail()
            logger.exception("a relay failed; its readers go on by themselves")
        finally:
            self._has_told.set()

    def _pass_on(self) -> None:
        while True:
            is_orphan = self._is_orphan
            is_needed = not is_orphan or self._is_awaited()
            if is_orphan:  # readers that closed are reported before the relay's own end
                self._report()
                self._has_told.set()
            elif self._is_report_due():
                self._report()
            if not is_needed:
                self._close()
                return
            self._attend()
            pause = ACK_DELAY if self._behind or self._unreported else _LOOK
            if self._is_window_full():
                native, pause = self.ring.native, 0.0
                with suppress(ReaderDied):  # which the next report tells
                    if native.wait_until_read(native.position - self._behind, ACK_DELAY):
                        continue
            try:
                with self.stream.turn:
                    message = self.stream.take(pause, self, deadline_of(pause))
            except TimedOut:
                continue
            except Cancelled:
                self._leaving.clear()
                continue
            self._put(message)

    def _is_report_due(self) -> bool:
        session = self.stream.session
        return (
            4 * self._unreported >= session.window
            or 4 * self._unreported_bytes >= session.window_bytes
            or self._is_window_full()
            or time.monotonic() >= self._report_at
        )

    def _is_window_full(self) -> bool:
        """The writer sends nothing before one more message is read, or nothing as large as the
        latest. So what is to be waited for is the ring, and not the network."""
        behind = self._behind + self._unreported
        while len(self._sizes) > behind:
            self._unread_bytes -= self._sizes.popleft()
        if not self._sizes:
            return False
        session = self.stream.session
        has_room_for_it = self._unread_bytes + self._sizes[-1] <= session.window_bytes
        return behind >= session.window or not has_room_for_it

    def is_set(self) -> bool:
        """Asked while it waits for a message: is there something else to do?"""
        session = self.stream.session
        is_ready = session.is_ready and self._has_name
        return self._leaving.is_set() or is_ready or session.absent is not self._heard

    def _fail(self) -> None:
        """Ends the ring, but not the stream, if the reader in this process still needs it. The
        writer learns of it at once, and sends again what that reader has not taken."""
        # In this order: that reader finds its ring dead, and looks whether the relay has failed.
        with suppress(Closed), ExitStack() as ending:  # closed: that reader has ended meanwhile
            ending.callback(self.ring.abandon)
            ending.enter_context(undone_by(self.stream.abandon))
            own = participant(self.ring.native, 1 + self._plan.place)
            self.stream.go_alone(own.position)
            self.has_failed = True
            if self._is_orphan:
                self.stream.close()

    def _close(self) -> None:
        """The readers get what is in the ring, then `Closed`."""
        with closing(self.stream):
            self.ring.native.close()  # who has not come, the writer says

    def _put(self, message: Message) -> None:
        """Into the ring; meanwhile the writer is kept informed, because this may last."""
        native, encoder = self.ring.native, self._encoder
        try:
            if self._encode(message):
                self._until_done(lambda: native.send_encoded(encoder, ACK_DELAY, None))
            else:  # what is not an object; its readers raise CorruptMessage, each once
                block = native.write_block(self.ring, ACK_DELAY)
                self._until_done(block.__enter__)
                block.__exit__(None, None, None)
        finally:
            encoder.clear()
        nbytes = len(message.memory)  # now, because a report in between does not know of it
        self._sizes.append(nbytes)
        self._unread_bytes += nbytes
        self._unreported += 1
        self._unreported_bytes += nbytes

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
            except (TimedOut, ReaderDied):
                self._report()
                self._attend()
                self.stream.hear()
                if self.stream.session.is_over(time.monotonic()):
                    self._give_up_all_but([])

    # Who reads here ---------------------------------------------------------------------------

    def _report(self) -> None:
        """Tells the writer what is new."""
        native = self.ring.native
        rows, behind = [], 0
        for place in tuple(self._places):
            who = participant(native, 1 + place)
            if who.state == "dead" and place not in self._dead:
                # The writer decides what becomes of the queue; the others here go on.
                self._dead.add(place)
                native.release_reader(place)
            state = "dead" if place in self._dead else who.state
            if state == "absent":
                continue
            rows.append(ReportRow(place, who.pid, state, who.position))
            if state not in ("dead", "closed"):
                behind = max(behind, native.position - who.position)
        self._behind, self._unreported, self._unreported_bytes = behind, 0, 0
        now = time.monotonic()
        self._report_at = now + ACK_DELAY
        if rows != self._told or now - self._told_at >= _REPEAT:
            self._told, self._told_at = rows, now
            self.stream.report(self._plan.name, self._plan.ring_id, rows)

    def _is_awaited(self) -> bool:
        """Does anybody read here, or may still come to do so?"""
        native = self.ring.native
        states = (participant(native, 1 + place).state for place in tuple(self._places))
        return any(state not in ("dead", "closed") for state in states)

    def _attend(self) -> None:
        """Until everybody is there: asks which readers are absent."""
        session, native = self.stream.session, self.ring.native
        if not self._has_name:
            return
        if session.is_ready:
            self._give_up_all_but([])
            native.set_absent_elsewhere(0)
            with suppress(TimedOut, ReaderDied):  # of a death since; it is let go in a moment
                self.ring.wait_until_ready(0)  # removes the ring's name
                self._has_name = False
            return
        if not session.is_ended:
            self.stream.ask_who_is_absent()
        heard = session.absent
        if heard is not None and heard is not self._heard:
            self._give_up_all_but(heard.places)
            native.set_absent_elsewhere(heard.beside)
        self._heard = heard

    def _give_up_all_but(self, free: list[int]) -> None:
        """A reader that is neither here nor absent will not come here: nobody waits for it."""
        native, kept = self.ring.native, set(free)
        for place in [place for place in self._places if place not in kept]:
            is_absent = participant(native, 1 + place).state == "absent"
            if is_absent and native.release_reader(place):
                self._places.remove(place)

    # The end ----------------------------------------------------------------------------------

    def leave(self, timeout: float | None) -> None:
        """The reader in this process has closed; the relay ends with the last of the others."""
        if self._pid != os.getpid():
            self._close()  # of this child's copies
            return
        self._is_orphan = True
        self._leaving.set()
        self.stream.wake()
        with suppress(Closed):
            if self._is_awaited():
                self._has_told.wait(_LAST_WORDS)
            else:
                self._thread.join(_LAST_WORDS)
        if self.has_failed:
            self.stream.close(timeout)

    def abandon(self) -> None:
        """Ends at once; to the readers, and to the writer, it looks like a death."""
        self.ring.abandon()
        self.stream.abandon()
