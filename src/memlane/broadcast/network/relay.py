"""Relays one stream of messages to all readers of a host: received once, passed on through a ring.

The relay is a thread in the process of one of those readers. It takes messages from the network
without decoding them and puts them into its own ring in this host's memory, from which all readers
of the host read, that one included. It acknowledges nothing itself: it reports to the writer, for
each reader behind it, its pid, its state and what it has taken. So the writer's window covers the
whole path, and the writer names a slow or dead reader as if it were connected directly. The writer
decides who relays (`protocol/places.py`). When a relay ends, the readers behind it find its ring
dead and continue over the connections that they have kept. If the relay cannot continue, for lack
of memory on this host for example, its own reader does the same.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from contextlib import ExitStack, closing, suppress
from pickle import PickleBuffer
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from memlane._base.deadline import Deadline
from memlane._base.diagnosis import participant
from memlane._base.lifetime import start_thread, undone_by
from memlane._base.msgspec import msgspec
from memlane._base.segments import name_of, new_id
from memlane._native import Encoder, Outgoing
from memlane.broadcast.handle import RingAddress
from memlane.broadcast.local import LocalWriter
from memlane.broadcast.protocol.frames import Absent, Kind, ReportRow, Ring
from memlane.broadcast.protocol.message import Message, split
from memlane.broadcast.protocol.reader_session import ACK_DELAY
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

    from memlane.broadcast.network.reader import NetworkReader
    from memlane.broadcast.options import NetworkAddress

logger = logging.getLogger("memlane")

# Seconds between liveness checks of the readers. Progress is reported as a connected reader would
# acknowledge: after a quarter of the window, after ACK_DELAY, and at once if the window is full.
_LOOK = 0.25
# Most seconds after which an unchanged report is repeated: a lost connection may have dropped the
# last, and a relay that is silent for the bound is taken for one that is stopped.
_REPEAT = 1.0
_LAST_WORDS = 2.0  # seconds for the last report, after which the process may end
_KEEP_BYTES = 256 * 1024 * 1024


def address_of(ring: Ring, writer: NetworkAddress, writer_pid: int) -> RingAddress:
    """Returns the address of a relay's ring. Raises InvalidArgument if nobody can have made it."""
    sizes, origin = (ring.max_chunk_bytes, ring.max_chunks), (writer_pid, writer.endpoint.text)
    return RingAddress.of_relay(ring.name, ring.ring_id, ring.ranks, sizes, writer.codec, origin)


def named(plan: Ring) -> Ring:
    """Gives a ring that this process is to make its name."""
    ring_id = new_id()
    return msgspec.structs.replace(plan, name=name_of(ring_id), ring_id=ring_id.hex())


_NOTHING = Message(0, Kind.RAW, b"")


class _Passing:
    """A codec that makes an `Encoder` hold a message that the writer has encoded already."""

    def __init__(self) -> None:
        self.outgoing = Outgoing()
        self.message = _NOTHING

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
    """Creates the ring that the writer has requested, and fills it; leaves none if it raises.

    The caller owns the stream until `start`.
    """

    def __init__(self, stream: NetworkReader, address: RingAddress, plan: Ring) -> None:
        self.stream, self.address, self._plan = stream, address, plan
        to = address.geometry, address.queue_id, address.ranks, address.codec
        self.ring = LocalWriter(*to, _KEEP_BYTES, has_others=True)
        self.ring.label = stream.label
        self._places = list(range(len(plan.ranks)))  # of readers that are here or may attach
        self._dead: set[int] = set()
        self._sizes: deque[int] = deque()  # of the messages that some reader has yet to read
        self._unread_bytes = 0
        self._behind = 0  # messages that the slowest reader had yet to take at the last report
        self._unreported = 0  # messages since then, and their bytes
        self._unreported_bytes = 0
        self._report_at = 0.0
        self._reported: list[ReportRow] | None = None
        self._reported_at = 0.0
        self._repeat = min(_REPEAT, stream.bound / 4)
        self._heard: Absent | None = None  # the latest answer that was handled
        self._has_name = True
        self._pid = os.getpid()
        # No Events: a signal handler may close the reader while that closes, and they hold a lock.
        self._reader_has_left = False  # the reader in this process has closed
        self._must_look = False  # it has just done so
        self._told: SimpleQueue[None] = SimpleQueue()  # gets an item once the writer knows
        self.has_failed = False  # if so, the stream belongs to that reader
        self._codec = _Passing()
        self._encoder = Encoder(self._codec)
        self._thread = threading.Thread(
            target=self._run, name=f"memlane-relay-{stream.rank}", daemon=True
        )
        self.ring.native.set_absent_elsewhere(1)  # no reader is ready until the writer says so

    def start(self) -> None:
        """Reports the ring to the writer, so that readers can attach, and starts to pass on."""
        self._report()
        start_thread(self._thread)

    # The thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._pass_on()
        except WriterClosed:
            self._close()
        except Closed:
            self.abandon()
        except PeerDied as error:
            logger.warning(
                "%s; the readers behind this relay continue over their own connections", error
            )
            self.abandon()
        except (MemoryError, SystemFault) as error:
            self._fail()
            logger.warning(
                "%r; the readers behind this relay continue over their own connections", error
            )
        except BaseException:  # it would go unnoticed otherwise
            self._fail()
            logger.exception("a relay failed; its readers continue over their own connections")
        finally:
            self._told.put(None)

    def _pass_on(self) -> None:
        while True:
            has_left = self._reader_has_left
            is_needed = not has_left or self._is_awaited()
            if has_left:  # readers that closed are reported before the relay's own end
                self._report()
                self._told.put(None)
            elif self._is_report_due():
                self._report()
            if not is_needed:
                self._close()
                return
            self._attend()
            pause = ACK_DELAY if self._behind or self._unreported else _LOOK
            if self._is_window_full():
                native, pause = self.ring.native, 0.0
                with suppress(ReaderDied):  # the next report says so
                    if native.wait_until_read(native.position - self._behind, ACK_DELAY):
                        continue
            try:
                with self.stream.guard:
                    message = self.stream.take(Deadline(pause), self)
            except TimedOut:
                continue
            except Cancelled:
                self._must_look = False
                continue
            self._put(message)
            del message  # it may be large, and the next one may be long in coming

    def _is_report_due(self) -> bool:
        session = self.stream.session
        return (
            4 * self._unreported >= session.window
            or 4 * self._unreported_bytes >= session.window_bytes
            or self._is_window_full()
            or time.monotonic() >= self._report_at
        )

    def _is_window_full(self) -> bool:
        """Returns whether the writer has no room for another message, or for one as large as the
        latest, until a message is read. If so, the relay waits for the ring, not for the network.
        """
        behind = self._behind + self._unreported
        while len(self._sizes) > behind:
            self._unread_bytes -= self._sizes.popleft()
        if not self._sizes:
            return False
        session = self.stream.session
        has_room_for_it = self._unread_bytes + self._sizes[-1] <= session.window_bytes
        return behind >= session.window or not has_room_for_it

    def is_set(self) -> bool:
        """Returns whether there is something other than messages; the relay is the `cancel` of
        `take`."""
        session = self.stream.session
        is_ready = session.is_ready and self._has_name
        return self._must_look or is_ready or session.absent is not self._heard

    def _fail(self) -> None:
        """Ends the ring, but not the stream if the reader in this process still needs it. Tells the
        writer at once, which sends again what that reader has not taken."""
        # The ring dies last: when that reader finds it dead, it checks `has_failed`.
        with suppress(Closed), ExitStack() as ending:  # Closed: that reader has ended meanwhile
            ending.callback(self.ring.abandon)
            ending.enter_context(undone_by(self.stream.abandon))
            own = participant(self.ring.native, 1 + self._plan.place)
            self.stream.go_alone(own.slot.position)
            self.has_failed = True
            if self._reader_has_left:
                self.stream.close()

    def _close(self) -> None:
        """The readers get what is in the ring, then `WriterClosed`."""
        with closing(self.stream):
            self.ring.native.close()  # not `ring.close`: the writer reports absent readers

    def _put(self, message: Message) -> None:
        """Puts the message into the ring; keeps reporting to the writer while that blocks."""
        native, encoder = self.ring.native, self._encoder
        try:
            if self._encode(message):
                self._until_done(lambda: native.send_encoded(encoder, ACK_DELAY, None))
            else:  # not an object: each reader raises CorruptMessage once
                block = native.write_block(self.ring, ACK_DELAY)
                self._until_done(block.__enter__)
                block.__exit__(None, None, None)
        finally:
            encoder.clear()
            self._codec.message = _NOTHING
        nbytes = len(message.memory)  # counted only now: reports during the wait do not cover it
        self._sizes.append(nbytes)
        self._unread_bytes += nbytes
        self._unreported += 1
        self._unreported_bytes += nbytes

    def _encode(self, message: Message) -> bool:
        """Makes the encoder hold the message's bytes; False if it is not an object, or corrupt."""
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
        """Reports the readers to the writer, if anything changed or a repeat is due."""
        native = self.ring.native
        rows, behind = [], 0
        for place in tuple(self._places):
            who = participant(native, 1 + place)
            if who.state == "dead" and place not in self._dead:
                # The writer decides how the queue continues; the other readers here go on.
                self._dead.add(place)
                native.release_reader(place)
            state = "dead" if place in self._dead else self._state_of(place)
            if state == "absent":
                continue
            rows.append(ReportRow(place, who.slot.pid, state, who.slot.position))
            if state not in ("dead", "closed"):
                behind = max(behind, native.position - who.slot.position)
        self._behind, self._unreported, self._unreported_bytes = behind, 0, 0
        now = time.monotonic()
        self._report_at = now + ACK_DELAY
        if rows != self._reported or now - self._reported_at >= self._repeat:
            self._reported, self._reported_at = rows, now
            self.stream.report(self._plan.name, self._plan.ring_id, rows)

    def _is_awaited(self) -> bool:
        """Returns whether any reader is here or may still attach."""
        states = (self._state_of(place) for place in tuple(self._places))
        return any(state not in ("dead", "closed") for state in states)

    def _state_of(self, place: int) -> str:
        """The relay's own reader knows it first: in a signal handler, `close()` ends after the
        call."""
        has_closed = self._reader_has_left and place == self._plan.place
        return "closed" if has_closed else participant(self.ring.native, 1 + place).state

    def _attend(self) -> None:
        """Until all readers have attached: asks the writer which are absent."""
        session, native = self.stream.session, self.ring.native
        if not self._has_name:
            return
        if session.is_ready:
            self._give_up_all_but([])
            native.set_absent_elsewhere(0)
            with suppress(TimedOut, ReaderDied):  # died since: the next report releases it
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
        """Releases places neither attached here nor in `free`: their readers never attach here."""
        native, kept = self.ring.native, set(free)
        for place in [place for place in self._places if place not in kept]:
            is_absent = participant(native, 1 + place).state == "absent"
            if is_absent and native.release_reader(place):
                self._places.remove(place)

    # The end ----------------------------------------------------------------------------------

    def leave(self, timeout: float | None) -> None:
        """After this process's reader has closed: the relay ends with the last of the others."""
        if self._pid != os.getpid():
            self._close()  # a forked child's copies
            return
        if self._reader_has_left:
            return  # in a signal handler: the interrupted call goes on with it
        self._reader_has_left = self._must_look = True
        self.stream.incoming.wake()
        with suppress(Closed):
            if not self._is_awaited():
                self._thread.join(_LAST_WORDS)
            else:
                with suppress(Empty):
                    self._told.get(timeout=_LAST_WORDS)
        if self.has_failed:
            self.stream.close(timeout)

    def abandon(self) -> None:
        """Ends at once; the readers and the writer see a death."""
        self.ring.abandon()
        self.stream.abandon()
