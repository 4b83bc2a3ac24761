"""Gather: many writers and one reader, which gets the messages of each in order, of all in turn."""

from __future__ import annotations

import os
import select
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any, Self

from memlane._base.arguments import MAX_SEGMENT_BYTES, integer_from
from memlane._base.deadline import Deadline
from memlane._base.diagnosis import participant
from memlane._base.handle_text import check_version, handle_in, handle_text
from memlane._base.labels import LONGEST, checked_label
from memlane._base.naming import names_of
from memlane._base.segments import name_of, new_id
from memlane._base.serialization import Codec, codec_of
from memlane._native import RingGather, RingReader, RingSegment, RingWriter, after_return
from memlane.broadcast.any_queue import AnyQueue, M
from memlane.broadcast.handle import (
    FORMAT_VERSION,
    RingAddress,
    checked_rank,
    id_in,
    id_of_requests,
)
from memlane.broadcast.local import RESERVED_CHUNK_BYTES, LocalEnd, has_ended
from memlane.broadcast.ring import ring_geometry
from memlane.broadcast.starting import Starting
from memlane.broadcast.statistics import GatherStatistics, WriterStatistics
from memlane.broadcast.watching import JointWatch
from memlane.errors import (
    Closed,
    InvalidArgument,
    InvalidType,
    RankTaken,
    ReaderDied,
    TimedOut,
    WriterClosed,
    WriterDied,
    WrongRole,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from memlane._native import RingGeometry
    from memlane.broadcast.queue import MessageQueue
    from memlane.broadcast.statistics import ReaderState

_NOTHING = object()
_MOST_WRITERS = 1 << 12
_LONGEST_NAME = LONGEST - len("[4095]")
_CANCEL_SLICE = 0.1  # seconds
_LONGEST_SLICE = 86400.0  # poll() takes milliseconds as a 32-bit int


@dataclass
class GatherHandle:
    """The address that one writer attaches with. Send it pickled, or as JSON text.

    Attributes:
        rank: the writer's.
        n_writer: number of writers.
        buffer_handle: (1, max_chunk_bytes, max_chunks, name) of its ring.
        queue_id: 32 hexadecimal digits; a segment of another gather is refused.
        serializer: "pickle" or "msgpack", as the reader chose.
        max_extent_bytes: size of the pool for large messages.
        format_version: of the handle and of the messages.
    """

    rank: int
    n_writer: int
    buffer_handle: tuple[int, int, int, str]
    queue_id: str
    serializer: str
    max_extent_bytes: int
    format_version: int = FORMAT_VERSION

    def to_json(self) -> str:
        """The handle as JSON text, for channels that do not carry pickles. Raises nothing."""
        return handle_text(self)

    @staticmethod
    def from_json(text: str | bytes) -> GatherHandle:
        """Parses a handle; raises InvalidArgument (a ValueError) if `text` is not one."""
        handle = handle_in(text, GatherHandle, FORMAT_VERSION)
        handle.validate()
        return handle

    def validate(self) -> None:
        """Raises InvalidArgument unless a gather could have written every field."""
        _ring_of(self)


def _ring_of(handle: GatherHandle) -> RingAddress:
    """The ring of the handle's writer; raises InvalidArgument if no gather can have made it."""
    try:
        check_version(handle.format_version, FORMAT_VERSION)
        count = integer_from("n_writer", handle.n_writer, 1, _MOST_WRITERS)
        integer_from("rank", handle.rank, 0, count - 1)
        n_reader, max_chunk_bytes, max_chunks, name = handle.buffer_handle
        geometry = ring_geometry(n_reader, max_chunk_bytes, max_chunks)
        codec = codec_of(handle.serializer)
        integer_from("max_extent_bytes", handle.max_extent_bytes, 0)
        return RingAddress(geometry, name, id_in(handle.queue_id), codec, (0,))
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"this handle was not made by a gather: {error}") from None


class _Ring(LocalEnd[RingReader]):
    """The reader's end of one writer's ring, which it has created."""

    def __init__(self, geometry: RingGeometry, rank: int, codec: Codec, label: str) -> None:
        self.id = new_id()
        self.rank = rank
        segment = RingSegment.create(geometry, self.id, name_of(self.id), RESERVED_CHUNK_BYTES, 1)
        segment.label = label and f"{label}[{rank}]"
        super().__init__(segment, lambda: RingReader(segment, [0], codec, 0, 0, None))

    @property
    def writer_state(self) -> ReaderState:
        return participant(self.native, 0).state


class _Writer(LocalEnd[RingWriter]):
    def __init__(self, handle: GatherHandle, ring: RingAddress) -> None:
        self.rank = handle.rank
        pool = min(handle.max_extent_bytes, MAX_SEGMENT_BYTES)
        try:
            segment = RingSegment.attach(ring.geometry, ring.name, ring.queue_id, 0)
            super().__init__(
                segment, lambda: RingWriter(segment, ring.ranks, ring.codec, pool, False)
            )
            self.native.expect(1 + handle.n_writer)
        except RankTaken as error:
            raise RankTaken(f"writer {self.rank} cannot attach: {error}") from None


def _reader_died(pid: int) -> ReaderDied:
    return ReaderDied(None, pid, ": it was the reader, so nobody gathers messages any more")


class _Reader:
    """All rings of a gather; as an end, what awaiting needs of it."""

    SLEEPS = True  # by one sleep for all rings, where the system can do that

    def __init__(self, geometry: RingGeometry, n_writer: int, codec: Codec, label: str) -> None:
        self.rings: list[_Ring] = []
        with ExitStack() as undo:
            for rank in range(n_writer):
                self.rings.append(_Ring(geometry, rank, codec, label))
                undo.callback(self.rings[-1].abandon)
            self._gather = RingGather([ring.native for ring in self.rings], _NOTHING)
            undo.pop_all()
        self._sleeps = self.SLEEPS and RingGather.can_wait_for(n_writer)
        self._former_pids: set[int] = set()  # of writers whose rings have ended
        self._former: dict[
            int, tuple[int, int, int]
        ] = {}  # their messages, bytes and waits, by rank
        self._pid = os.getpid()
        self._dead: int | None = None
        self._is_closed = False
        self._watch: JointWatch | None = None

    def check(self) -> None:
        if self._is_closed:
            raise Closed("this gather is closed")
        if os.getpid() != self._pid:
            self.rings[0].check()

    def receive(self, timeout: float | None, cancel: threading.Event | None, lends: bool) -> Any:
        deadline = Deadline(timeout) if timeout else None
        left = timeout
        while True:
            if self._dead is not None and not self.rings[self._dead].native.is_closed:
                raise self.death(self._dead)
            try:
                message = self._receive(left, cancel, lends)
                if message is not _NOTHING:
                    return message
                raise self.timed_out(timeout)
            except (Closed, WriterDied) as error:
                rank = self._gather.ended
                if rank is None or self._is_closed:  # of a message's own, or no ring is left
                    if isinstance(error, Closed) and not isinstance(error, WriterClosed):
                        self._must_have_any()
                    raise
                if isinstance(error, WriterDied):
                    self._dead = rank
                elif isinstance(error, WriterClosed):
                    self._leave(rank)
                    self._must_have_any()
                elif not self.rings[rank].native.is_closed:
                    raise
            left = timeout if deadline is None else deadline.timeout_left()

    @property
    def open(self) -> int:
        """Number of writers whose rings have not ended."""
        return sum(not ring.native.is_closed for ring in self.rings)

    def _must_have_any(self) -> None:
        if not self._is_closed and not self.open:
            raise WriterClosed("all writers have closed, and everything has been read")

    def _receive(self, timeout: float | None, cancel: threading.Event | None, lends: bool) -> Any:
        if self._sleeps:
            return self._gather.receive(timeout, cancel, lends)
        deadline = Deadline(timeout)
        poller = select.poll()
        poller.register(self.watch(), select.POLLIN)
        while True:
            message = self._gather.receive(0, cancel, lends)
            if message is not _NOTHING or deadline.has_passed():
                return message
            most = _LONGEST_SLICE if cancel is None else _CANCEL_SLICE
            poller.poll(ceil(1000 * deadline.left(most)))

    def death(self, rank: int) -> WriterDied:
        who = participant(self.rings[rank].native, 0)
        sent, since = who.slot.position, who.last_progress
        detail = f" after {sent} messages, {since}; call release_writer({rank}) to "
        return WriterDied(who.slot.pid, detail + "continue without it", rank)

    def _leave(self, rank: int) -> None:
        """Goes on without it. May be repeated if it was interrupted."""
        ring = self.rings[rank]
        if ring.native.is_closed:
            return
        self._former_pids |= ring.pids()
        messages, size, waits, _ = ring.native.counters()
        self._former[rank] = (messages, size, waits)
        if self._watch is not None:  # of the last one it stays, readable for ever
            left = [r for r in self.rings if r.rank != rank and not r.native.is_closed]
            self._watch.become(*(r.native.watch() for r in left or [ring]))
        ring.close()

    def ring(self, rank: int) -> _Ring:
        if rank >= len(self.rings):
            raise InvalidArgument(f"the gather has no writer {rank}: it has {len(self.rings)}")
        return self.rings[rank]

    def release(self, rank: int) -> None:
        ring = self.ring(rank)
        if ring.native.is_closed:
            self.check()
            return
        has_ended(participant(ring.native, 0))
        state = ring.writer_state
        unread = participant(ring.native, 0).slot.position > ring.position
        if state == "dead" and unread and self._dead != rank:
            raise InvalidArgument(
                f"writer {rank} is dead, but has sent messages that were not read: it can be "
                f"released once dequeue() has raised WriterDied"
            )
        if state == "closed":
            raise InvalidArgument(
                f"writer {rank} has closed: dequeue() returns what it has sent, and then goes on "
                f"without it"
            )
        if state not in ("dead", "absent"):
            raise InvalidArgument(
                f"writer {rank} is {state}: only a dead or absent writer can be released; end its "
                f"process first"
            )
        self._leave(rank)

    def wait_until_ready(self, timeout: float | None, processes: Iterable[object]) -> None:
        deadline = Deadline(timeout)
        self.check()
        with Starting(self._pids, processes) as starting:
            coming = _Coming(self, starting)
            for ring in self.rings:
                if ring.native.is_closed:
                    continue
                try:
                    ring.native.wait_until_ready(deadline.left(), coming)
                except TimedOut:
                    absent = [
                        f"writer {other.rank} (never attached)"
                        for other in self.rings
                        if not other.native.is_closed and other.writer_state == "absent"
                    ]
                    names = names_of(absent)
                    text = f"timed out after {timeout} s waiting for {names}"
                    raise TimedOut(text, timeout) from None
                except WriterDied as error:
                    rank = ring.rank if error.rank is None else error.rank
                    raise self.death(rank) from None

    def _pids(self) -> set[int]:
        here = (ring.pids() for ring in self.rings if not ring.native.is_closed)
        return self._former_pids.union(*here)

    def watch(self) -> JointWatch:
        """Kept as long as this object."""
        if self._watch is None:
            self.check()
            self._must_have_any()
            self._watch = JointWatch(
                *(ring.native.watch() for ring in self.rings if not ring.native.is_closed)
            )
        return self._watch

    signal = watch

    def show_waiting(self, is_waiting: bool, is_first: bool) -> None:
        for ring in self.rings:
            if not ring.native.is_closed:
                ring.show_waiting(is_waiting, is_first)

    def stall_line(self, _waited: float) -> str | None:
        return None  # an idle gather is not worth a line

    def timed_out(self, timeout: float | None) -> TimedOut:
        return TimedOut(
            f"timed out after {timeout} s; none of {self.open} writers has sent a message", timeout
        )

    def close(self) -> None:
        self._is_closed = True
        self._each(lambda ring: ring.close())

    def abandon(self) -> None:
        self._is_closed = True
        self._each(lambda ring: ring.abandon())

    def _each(self, end: Callable[[_Ring], None]) -> None:
        with ExitStack() as stack:  # all, whatever one of them raises
            for ring in self.rings:
                stack.callback(end, ring)

    def statistics(self) -> GatherStatistics:
        self.check()
        rows, counters = [], []
        for ring in self.rings:
            if ring.native.is_closed:
                rows.append(WriterStatistics(ring.rank, None, "closed", 0))
                counters.append(self._former.get(ring.rank, (0, 0, 0)))
                continue
            counters.append(ring.native.counters()[:3])
            who = participant(ring.native, 0)
            is_here = who.state != "absent"
            behind = max(0, who.slot.position - ring.position) if is_here else 0
            pid = who.slot.pid if is_here else None
            rows.append(WriterStatistics(ring.rank, pid, ring.writer_state, behind))
        messages, size, waits = (sum(column) for column in zip(*counters, strict=True))
        return GatherStatistics(os.getpid(), messages, size, waits, tuple(rows))


class _Coming:
    """The `watch` of a wait for one writer, which notices the deaths of all."""

    def __init__(self, reader: _Reader, starting: Starting) -> None:
        self._reader, self._starting = reader, starting

    def is_set(self) -> bool:
        for ring in self._reader.rings:
            if not ring.native.is_closed and ring.writer_state == "dead":
                raise self._reader.death(ring.rank)
        return self._starting.is_set()


class Gather(AnyQueue[M]):
    """The reader of many writers, or one of the writers (`create_from_handle`).

    Each writer has a ring of its own, so writers never wait for each other. The reader takes one
    message of each in turn, and sleeps for all of them at once.

    Args:
        n_writer: number of writers; their ranks are 0 to n_writer - 1.
        max_chunk_bytes, max_chunks: of each writer's ring, as for `MessageQueue`.
        max_extent_bytes: size of each writer's pool for larger messages, as for `MessageQueue`.
        serializer: "pickle", or "msgpack", which executes no code when decoding.
        name: what people call the gather, at most 34 characters of those that a queue may have;
            each writer's ring has it with the writer's rank, as `replies[2]`.

    Raises:
        InvalidArgument: no writer, or too many.
        ShmExhausted: /dev/shm has no space for it.

    As of a queue, one thread at a time may use it in a process; `close()` may be called from any.
    """

    _reader: _Reader | None
    _writer: _Writer | None
    _instead_of_pickling = (
        "send export_handle(rank), and call Gather.create_from_handle(handle, rank) in the writer"
    )

    def __init__(
        self,
        n_writer: int,
        max_chunk_bytes: int = 10 * 1024 * 1024,
        max_chunks: int = 10,
        *,
        max_extent_bytes: int = 1024 * 1024 * 1024,
        serializer: str = "pickle",
        name: str | None = None,
    ) -> None:
        count = integer_from("n_writer", n_writer, 1, _MOST_WRITERS)
        geometry = ring_geometry(1, max_chunk_bytes, max_chunks)
        pool = min(integer_from("max_extent_bytes", max_extent_bytes, 0), MAX_SEGMENT_BYTES)
        label = checked_label(name, _LONGEST_NAME)
        reader = _Reader(geometry, count, codec_of(serializer), label)
        self._geometry, self._pool, self._serializer = geometry, pool, serializer
        self._setup(reader, None)

    @classmethod
    def create_from_handle(cls, handle: GatherHandle, rank: int) -> Self:
        """Attaches writer `rank`.

        Raises:
            InvalidType, InvalidArgument: the handle is not one of a gather, or another writer's.
            SegmentMissing: the reader has closed or ended, or this is another host.
            RankTaken: the rank is or was attached.
            SegmentRefused, LayoutMismatch: the file of that name is not the gather's memory.
        """
        if not isinstance(handle, GatherHandle):
            raise InvalidType(f"a GatherHandle is needed, not {type(handle).__name__}")
        ring = _ring_of(handle)
        if checked_rank(rank) != handle.rank:
            raise InvalidArgument(f"this handle is writer {handle.rank}'s, not writer {rank}'s")
        gather = cls.__new__(cls)
        gather._setup(None, _Writer(handle, ring))
        return gather

    def _setup(self, reader: _Reader | None, writer: _Writer | None) -> None:
        self._reader, self._writer = reader, writer
        self._own(self._end.abandon)

    @property
    def _end(self) -> _Reader | _Writer:
        end = self._reader if self._writer is None else self._writer
        if end is None:
            raise Closed("this gather was never opened")
        return end

    def _must_be_reader(self, call: str) -> _Reader:
        if self._reader is None:
            raise WrongRole(f"Only the reader can {call}")
        return self._reader

    def _must_be_writer(self, call: str) -> _Writer:
        if self._writer is None:
            raise WrongRole(f"Only writers can {call}: make one with create_from_handle()")
        return self._writer

    def export_handle(self, rank: int) -> GatherHandle:
        """Returns the handle that writer `rank` attaches with.

        Raises:
            WrongRole: this is a writer.
            InvalidArgument: there is no such writer.
            Closed: this gather was closed.
        """
        reader, rank = self._must_be_reader("export_handle"), checked_rank(rank)
        reader.check()
        ring, g = reader.ring(rank), self._geometry
        place = (1, g.max_chunk_bytes, g.max_chunks, name_of(ring.id))
        return GatherHandle(
            rank, len(reader.rings), place, ring.id.hex(), self._serializer, self._pool
        )

    # Both ----------------------------------------------------------------------------------------

    def statistics(self) -> GatherStatistics:
        """Counters of this process, and in the reader the state of every writer.

        Raises:
            Closed: this gather was closed.
        """
        if self._writer is not None:
            messages, size, waits, _ = self._writer.native.counters()
            return GatherStatistics(os.getpid(), messages, size, waits, ())
        return self._must_be_reader("see that").statistics()

    def close(self) -> None:
        """Closes it in this process, and tells the peers. Idempotent, from any thread.

        What a writer has sent stays for the reader. Once the reader has closed, what writers send
        is discarded, with a warning in the log.
        """
        self._is_closed = True
        self._end.close()
        self._disown()

    def answers(self, work: MessageQueue[Any]) -> None:
        """Shows observers that the messages of this gather answer those of `work`, as
        `MessageQueue.answers`.

        Raises:
            InvalidType: `work` is not a MessageQueue.
            Closed: this gather was closed.
        """
        requests = id_of_requests(work)
        self._end.check()
        ends = [self._writer] if self._reader is None else self._reader.rings
        for end in ends:
            if end is not None and not end.native.is_closed:
                end.segment.note_work(requests)

    def __repr__(self) -> str:
        role = "reader" if self._writer is None else f"writer {self._writer.rank}"
        return f"<Gather {role}{' closed' if self._is_closed else ''}>"

    # A writer ------------------------------------------------------------------------------------

    def enqueue(self, obj: M, timeout: float | None = None) -> None:
        """Sends `obj` to the reader; blocks while this writer's ring is full. `timeout` is in
        seconds.

        Raises:
            WrongRole: this is the reader.
            TimedOut, ShmExhausted, InvalidType, Closed: as `MessageQueue.enqueue`.
            ReaderDied: the reader has died; its `rank` is None.
        """
        writer = self._writer or self._must_be_writer("enqueue")
        native = writer.native
        try:
            native.send(obj, timeout)
        except BaseException as error:
            if not native.has_sent:
                if isinstance(error, ReaderDied):
                    raise _reader_died(error.pid) from None
                raise
            after_return.error = error  # no call, after which another handler could run

    _enqueue = enqueue

    # The reader ----------------------------------------------------------------------------------

    def wait_until_ready(
        self, timeout: float | None = None, *, processes: Iterable[object] = ()
    ) -> None:
        """Returns when all writers have attached (in a writer: when the reader has), and removes
        the names of their rings; after that, nothing can be left behind.

        Args:
            timeout: in seconds.
            processes: those that you have started for it, as objects with `pid`, or pids: one that
                ends before it attaches is then reported, and not waited for.

        Raises:
            TimedOut: after `timeout` seconds; it names the missing writers.
            WriterDied: a writer has died. ReaderDied: the reader has, or, with `rank` None and an
                `exitcode`, one of `processes` has ended before it attached.
        """
        if self._writer is None:
            self._must_be_reader("wait").wait_until_ready(timeout, processes)
            return
        try:
            self._writer.wait_for_processes(timeout, processes)
        except ReaderDied as error:
            raise _reader_died(error.pid) from None

    def release_writer(self, rank: int) -> None:
        """Goes on without a writer that has died, or has never attached.

        Raises:
            WrongRole: this is a writer.
            InvalidArgument: there is no such writer, or it is alive, even if stopped or slow.
        """
        self._must_be_reader("release_writer").release(checked_rank(rank))

    def dequeue(
        self,
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        *,
        lend: bool = True,
    ) -> M:
        """Returns the next object of one of the writers, which then belongs to you.

        `timeout` (in seconds), `cancel` and `lend` are as for `MessageQueue.dequeue`.

        Raises:
            WrongRole: this is a writer.
            TimedOut, Cancelled: nothing is consumed.
            WriterDied: a writer has died, after all its messages; it has `rank` and `pid`. Every
                call raises it until `release_writer(rank)`.
            WriterClosed: all writers have closed, and everything has been read.
            Closed: this gather was closed.
            OutOfMemory, CorruptMessage, or what decoding raises: as `MessageQueue.dequeue`.
        """
        reader = self._reader or self._must_be_reader("dequeue")
        message: M = reader.receive(timeout, cancel, bool(lend))  # what that raises ends no ring
        return message
