"""Gather: many writers and one reader, which gets the messages of each in order, of all in turn.

Each writer has a ring of its own, and so has each process that takes its place later: a message
of the former one cannot be taken for one of the next, whenever it comes. A place is

    state     by             becomes   by
    absent                   taken     create_from_handle, of one process
                             left      release
    taken     its process    closed    close; what was sent is still read
                             dead      its end; what was sent is still read, then WriterDied
    closed    its process    left      the reader, when everything was read
    dead      the kernel     left      release, once WriterDied was raised
    left      the reader     absent    readmit, with a ring of its own

A ring's id stands in the handle, and its name goes when the place is left: handles from before are
refused.
"""

from __future__ import annotations

import os
import select
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from operator import add
from typing import TYPE_CHECKING, Any, Self

from memlane._base.arguments import MAX_SEGMENT_BYTES, integer_from
from memlane._base.deadline import Deadline
from memlane._base.diagnosis import participant
from memlane._base.handle_text import check_version, handle_in, handle_text, id_in
from memlane._base.labels import LONGEST, checked_label
from memlane._base.naming import names_of
from memlane._base.segments import name_of, new_id
from memlane._base.serialization import Codec, codec_of
from memlane._native import RingGather, RingReader, RingSegment, RingWriter, after_return
from memlane.broadcast.any_queue import AnyQueue, M
from memlane.broadcast.handle import (
    FORMAT_VERSION,
    RingAddress,
    attaching_rank,
    checked_rank,
)
from memlane.broadcast.local import (
    RESERVED_CHUNK_BYTES,
    LocalEnd,
    has_ended,
    place_has_ended,
)
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
    SegmentMissing,
    TimedOut,
    WriterClosed,
    WriterDied,
    WrongRole,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable

    from memlane._native import Burst, RingGeometry
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
        queue_id: 32 hexadecimal digits, of the writer's ring; any other segment is refused.
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
        return RingAddress(geometry, name, id_in("queue_id", handle.queue_id), codec, (0,))
    except (TypeError, ValueError, AttributeError) as error:
        raise InvalidArgument(f"this handle was not made by a gather: {error}") from None


class _Ring(LocalEnd[RingReader]):
    """The reader's end of one writer's ring, which it has created."""

    def __init__(
        self,
        geometry: RingGeometry,
        rank: int,
        codec: Codec,
        label: str,
        former: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        self.id = new_id()
        self.rank = rank
        self._former = self._totals = former  # of the rings that this rank had before
        segment = RingSegment.create(geometry, self.id, name_of(self.id), RESERVED_CHUNK_BYTES, 1)
        segment.label = label and f"{label}[{rank}]"
        super().__init__(segment, geometry, lambda: RingReader(segment, [0], codec, 0, 0, None))

    @property
    def writer_state(self) -> ReaderState:
        return participant(self.native, 0).state

    @property
    def has_unread(self) -> bool:
        return participant(self.native, 0).slot.position > self.position

    def totals(self) -> tuple[int, int, int]:
        """Returns how many messages, bytes and waits this rank had. Call it before the close."""
        if not self.native.is_closed:
            here = self.native.counters()[:3]
            messages, size, waits = map(add, self._former, here)
            self._totals = messages, size, waits
        return self._totals


class _Writer(LocalEnd[RingWriter]):
    def __init__(self, handle: GatherHandle, ring: RingAddress) -> None:
        self.rank = handle.rank
        pool = min(handle.max_extent_bytes, MAX_SEGMENT_BYTES)
        try:
            segment = RingSegment.attach(ring.geometry, ring.name, ring.queue_id, 0)
            super().__init__(
                segment,
                ring.geometry,
                lambda: RingWriter(segment, ring.ranks, ring.codec, pool, False),
            )
            self.native.expect(1 + handle.n_writer)
        except RankTaken as error:
            raise RankTaken(f"writer {self.rank} cannot attach: {error}") from None
        except SegmentMissing as error:
            raise SegmentMissing(
                ring.name,
                f"writer {self.rank} cannot attach: another process has its place, or it was "
                f"released, or opened again by readmit(), whose handle is then needed; or the "
                f"gather has closed or died, or was made on another host or in a container, which "
                f"has a /dev/shm of its own",
            ) from error

    def send_many(self, objects: tuple[Any, ...], timeout: float | None, burst: Burst) -> None:
        try:
            self.native.send_many(objects, timeout, burst)
        except ReaderDied as error:
            raise _reader_died(error.pid) from None


def _reader_died(pid: int) -> ReaderDied:
    return ReaderDied(None, pid, ": it was the reader, so nobody gathers messages any more")


class _Reader:
    """All rings of a gather; as an end, what awaiting needs of it."""

    SLEEPS = True  # by one sleep for all rings, where the system can do that

    def __init__(self, geometry: RingGeometry, n_writer: int, codec: Codec, label: str) -> None:
        self._kind = geometry, codec, label
        self._answered: bytes | None = None  # the id of the queue whose messages are answered here
        self.rings: list[_Ring] = []
        with ExitStack() as undo:
            for rank in range(n_writer):
                self.rings.append(self._new_ring(rank))
                undo.callback(self.rings[-1].abandon)
            self._gather = RingGather([ring.native for ring in self.rings], _NOTHING)
            undo.pop_all()
        self._sleeps = self.SLEEPS and RingGather.can_wait_for(n_writer)
        self._former_pids: set[int] = set()  # of writers whose rings have ended
        self._pid = os.getpid()
        self._dead: int | None = None
        self._is_closed = False
        self._watch: JointWatch | None = None

    def check(self) -> None:
        if self._is_closed:
            raise Closed("this gather is closed")
        if os.getpid() != self._pid:
            self.rings[0].check()

    def receive(
        self,
        timeout: float | None,
        cancel: threading.Event | None,
        lends: bool,
        most: int | None = None,
    ) -> Any:
        """Returns a message, or with `most` a list of so many at most."""
        deadline = Deadline(timeout) if timeout else None
        left = timeout
        while True:
            if self._dead is not None and not self.rings[self._dead].native.is_closed:
                raise self.death(self._dead)
            try:
                if not self._sleeps:
                    message = self._poll(left, cancel, lends, most)
                elif most is None:
                    message = self._gather[left, cancel, lends]
                else:
                    message = self._gather[left, cancel, lends, most]
                if message is not _NOTHING:
                    return message
                raise self.timed_out(timeout)
            except (Closed, WriterDied) as error:
                rank = self._gather.ended
                if self._is_closed and isinstance(error, WriterDied):  # closed meanwhile
                    self.check()
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

    receive_many = receive

    def _poll(
        self,
        timeout: float | None,
        cancel: threading.Event | None,
        lends: bool,
        most: int | None,
    ) -> Any:
        deadline = Deadline(timeout)
        poller = select.poll()
        poller.register(self.watch(), select.POLLIN)
        while True:
            if most is None:
                message = self._gather[0, cancel, lends]
            else:
                message = self._gather[0, cancel, lends, most]
            if message is not _NOTHING or deadline.has_passed():
                return message
            longest = _LONGEST_SLICE if cancel is None else _CANCEL_SLICE
            poller.poll(ceil(1000 * deadline.left(longest)))

    def death(self, rank: int) -> WriterDied:
        who = participant(self.rings[rank].native, 0)
        sent, since = who.slot.position, who.last_progress
        gather = f" of gather {self._kind[2]}" if self._kind[2] else ""
        detail = f" after {sent} messages{gather}, {since}; call release_writer({rank}) to "
        return WriterDied(who.slot.pid, detail + "continue without it", rank)

    @property
    def _name(self) -> str:
        """Returns the beginning of an error about a gather that has a name."""
        return f"gather {self._kind[2]}: " if self._kind[2] else ""

    def _leave(self, rank: int) -> None:
        """Goes on without it. May be repeated if it was interrupted."""
        ring = self.rings[rank]
        if ring.native.is_closed:
            return
        self._former_pids |= ring.pids()
        ring.totals()
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
        if state == "dead" and ring.has_unread and self._dead != rank:
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

    def _new_ring(self, rank: int, *former: tuple[int, int, int]) -> _Ring:
        geometry, codec, label = self._kind
        ring = _Ring(geometry, rank, codec, label, *former)
        if self._answered is not None:
            ring.segment.note_work(self._answered)
        return ring

    def readmit(self, rank: int) -> None:
        self.check()
        old = self.ring(rank)
        if not old.native.is_closed:
            state = old.writer_state
            if state != "closed" or old.has_unread:
                left = ", with messages that were not read" if state == "closed" else ""
                raise InvalidArgument(
                    f"writer {rank} is {state}{left}: only the place of one that has closed, all "
                    f"of whose messages were read, or that was released by release_writer({rank}), "
                    f"can be taken by another"
                )
            self._leave(rank)
        ring = self._new_ring(rank, old.totals())
        with ExitStack() as undo:
            undo.callback(self._watch_open)
            undo.callback(ring.abandon)
            self._watch_open(ring)
            self._gather.replace(rank, ring.native)
            undo.pop_all()
        if self._dead == rank:
            self._dead = None
        self.rings[rank] = ring
        if self._is_closed:  # meanwhile, from another thread
            ring.close()
            self.check()

    def _watch_open(self, *more: _Ring) -> None:
        """Makes the descriptor that of the open rings, if it was asked for and there are any."""
        here = [ring.native for ring in (*self.rings, *more) if not ring.native.is_closed]
        if self._watch is not None and here:
            self._watch.become(*(native.watch() for native in here))

    def note_work(self, requests: bytes) -> None:
        self.check()
        self._answered = requests
        for ring in self.rings:
            if not ring.native.is_closed:
                ring.segment.note_work(requests)

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
                    raise TimedOut(self._name + text, timeout) from None
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
        text = f"timed out after {timeout} s; none of {self.open} writers has sent a message"
        return TimedOut(self._name + text, timeout)

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
            counters.append(ring.totals())
            if ring.native.is_closed:
                rows.append(WriterStatistics(ring.rank, None, "closed", 0, 0))
                continue
            who = participant(ring.native, 0)
            is_here = who.state != "absent"
            taken = ring.position
            behind = max(0, who.slot.position - taken) if is_here else 0
            pid = who.slot.pid if is_here else None
            rows.append(WriterStatistics(ring.rank, pid, ring.writer_state, behind, taken))
        messages, size, waits = (sum(column) for column in zip(*counters, strict=True))
        return GatherStatistics(os.getpid(), messages, size, waits, tuple(rows))


class _Coming:
    """The `watch` of a wait for one writer, which notices the deaths of all."""

    def __init__(self, reader: _Reader, starting: Starting) -> None:
        self._reader, self._starting = reader, starting
        here = [ring.pids() for ring in reader.rings if not ring.native.is_closed]
        self.pids = [*set(starting.pids).union(*here)]

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

    Example::

        with Gather(n_writer=2) as answers:
            for rank in range(2):  # in two workers
                with Gather.create_from_handle(answers.export_handle(rank), rank) as writer:
                    writer.enqueue((rank, "done"))
            print(list(answers))  # [(0, 'done'), (1, 'done')]
    """

    _reader: _Reader | None
    _writer: _Writer | None
    _instead_of_pickling = (
        "send export_handle(rank), and call Gather.create_from_handle(handle) in the writer"
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
    def create_from_handle(cls, handle: GatherHandle, rank: int | None = None) -> Self:
        """Attaches the handle's writer. `rank` may be passed, too, and must then be that one's.

        Raises:
            InvalidType, InvalidArgument: the handle is not one of a gather, or another writer's.
            SegmentMissing: the reader has closed or ended, or this is another host.
            RankTaken: the rank is or was attached.
            SegmentRefused, LayoutMismatch: the file of that name is not the gather's memory.
        """
        if not isinstance(handle, GatherHandle):
            raise InvalidType(f"a GatherHandle is needed, not {type(handle).__name__}")
        ring = _ring_of(handle)
        attaching_rank(rank, handle.rank, "writer")
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
            InvalidArgument: there is no such writer, or its place is free: use `readmit`.
            Closed: this gather was closed.
        """
        reader, rank = self._must_be_reader("export_handle"), checked_rank(rank)
        reader.check()
        ring, g = reader.ring(rank), self._geometry
        if ring.native.is_closed:
            raise place_has_ended("writer", rank)
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
        """Goes on without a writer that has died, or has never attached; its place is closed until
        `readmit` opens it again.

        Raises:
            WrongRole: this is a writer.
            InvalidArgument: there is no such writer, or it is alive, even if stopped or slow.
        """
        self._must_be_reader("release_writer").release(checked_rank(rank))

    def readmit(self, rank: int) -> GatherHandle:
        """Opens the place of a writer that has closed or was released: one new process takes it by
        the returned handle and the same rank.

        What the former one has sent is never taken for the new one's, and handles from before are
        refused. Call `wait_until_ready` again to wait for the new process, and to remove the name
        of its ring.

        Raises:
            WrongRole: this is a writer.
            InvalidArgument: there is no such writer, or it has not ended: call `release_writer`
                first for one that has died, `dequeue` for one that has closed and sent more.
            ShmExhausted: /dev/shm has no space for its ring; nothing has changed.
            Closed: this gather was closed.
        """
        rank = checked_rank(rank)
        self._must_be_reader("readmit").readmit(rank)
        return self.export_handle(rank)

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
