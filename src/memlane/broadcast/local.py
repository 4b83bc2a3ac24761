"""The ends of a queue on one host, their blocks, and what `MessageQueue` uses of every end.

An end wraps a native one (`RingWriter`, `RingReader`) and adds ranks and statistics. A message is a
single native call: `send` is the native method itself. Ends towards other hosts are in `network`.
"""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast

from memlane._base.deadline import seconds_of
from memlane._base.diagnosis import failure, participant, stall_line, view_in_use, warn
from memlane._base.lifetime import undone_by
from memlane._base.naming import names_of, not_readmitted
from memlane._base.processes import is_ending, waits_for_its_end
from memlane._base.segments import name_of
from memlane._base.serialization import Codec
from memlane._base.survivors import survivor
from memlane._native import RingGeometry, RingReader, RingSegment, RingWriter
from memlane.broadcast.starting import Starting
from memlane.broadcast.statistics import QueueStatistics, ReaderStatistics
from memlane.broadcast.watching import AwaitableEnd, ReceivingEnd, ShownWatch
from memlane.errors import (
    Closed,
    InvalidArgument,
    RankTaken,
    SegmentMissing,
    WrongProcess,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    import zmq

    from memlane._base.slots import Seen
    from memlane._native import Burst, ViewLease
    from memlane.broadcast.handle import RingAddress
    from memlane.broadcast.watching import Watching
    from memlane.errors import MemlaneError

# Reserved of each chunk when the queue is created; the rest follows when a message needs it. With
# small messages, a default queue (10 chunks of 10 MiB) must fit a container's 64 MiB.
RESERVED_CHUNK_BYTES = 64 * 1024
# There is a chunk for each reader, but two or three are used if readers keep up.
RESERVED_OF_LATEST = 4096


_LONGEST_END = 1.0  # seconds that a process which has begun to end is waited for

Native = TypeVar("Native", RingWriter, RingReader)


class End(Protocol):
    """Common to all ends. Without a ring, `segment` is None and `position` is 0; `label` is what
    people call the queue."""

    label: str

    @property
    def segment(self) -> RingSegment | None: ...
    @property
    def position(self) -> int: ...
    @property
    def socket(self) -> zmq.Socket[bytes] | None: ...
    def wait_until_ready(self, timeout: float | None) -> None: ...
    def statistics(self) -> QueueStatistics: ...
    def check(self) -> None: ...
    def note_work(self, requests: bytes) -> None: ...
    def close(self, timeout: float | None = None) -> None: ...
    def abandon(self) -> None: ...


class Sending(Protocol):
    """Tells what a writer's last call of `send` has done, whatever was raised after that."""

    @property
    def has_sent(self) -> bool: ...


class WriterEnd(End, AwaitableEnd, Protocol):
    """A writer's end. `send` raises as `MessageQueue.enqueue` does, with nothing sent unless a
    signal handler raised and `sending` says otherwise."""

    @property
    def sending(self) -> Sending: ...
    @property
    def send(self) -> Callable[[Any, float | None], None]: ...
    @property
    def send_many(self) -> Callable[[tuple[Any, ...], float | None, Burst], None]: ...
    def wait_for_processes(self, timeout: float | None, processes: Iterable[object]) -> None: ...
    def block(self, owner: object, timeout: float | None) -> AbstractContextManager[memoryview]: ...
    def release_reader(self, rank: int) -> None: ...
    def readmit(self, rank: int) -> None: ...
    def secrets_for(self, rank: int | None) -> list[str]: ...


class ReaderEnd(End, ReceivingEnd, Protocol):
    """A reader's end. `receive` is `MessageQueue.dequeue`; its last argument is `lend`."""

    @property
    def rank(self) -> int: ...
    @property
    def geometry(self) -> RingGeometry | None: ...
    def view(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[Any]: ...
    def block(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[memoryview]: ...


class LocalEnd(Generic[Native]):
    """Common to writers and readers of a ring."""

    socket: zmq.Socket[bytes] | None = None

    def __init__(
        self, segment: RingSegment, geometry: RingGeometry, make: Callable[[], Native]
    ) -> None:
        """Abandons the segment if `make` raises."""
        with undone_by(segment.abandon):
            self.native: Native = make()
        self.segment = segment
        self._chunk_bytes = geometry.max_chunk_bytes

    def wait_until_ready(self, timeout: float | None) -> None:
        self.native.wait_until_ready(timeout)

    def wait_for_processes(self, timeout: float | None, processes: Iterable[object]) -> None:
        """Is `wait_until_ready`, and raises ReaderDied if one of them ends before it attaches."""
        with Starting(self.pids, processes) as starting:
            self.native.wait_until_ready(timeout, starting)

    def watch(self) -> Watching:
        return self.native.watch()

    signal = watch

    def show_waiting(self, is_waiting: bool, is_first: bool) -> None:
        """Shows it to observers, too. The attempt that came before a send counts as a wait."""
        self.native.show_waiting(is_waiting, is_first and self.native.slot != 0)

    def stall_line(self, waited: float) -> str | None:
        return stall_line(self.native, "chunk" if self.native.slot == 0 else "message", waited)

    def timed_out(self, timeout: float | None) -> MemlaneError:
        return cast("MemlaneError", failure(self.native, "timed_out", 0, timeout))

    def pids(self) -> set[int]:
        """Returns the pids of this pid namespace that have ever attached here."""
        seen = [participant(self.native, slot) for slot in range(1 + len(self.native.ranks))]
        return {who.slot.pid for who in seen if who.is_of_here}

    def check(self) -> None:
        self.native.check()

    def note_work(self, requests: bytes) -> None:
        self.check()
        self.segment.note_work(requests)

    def close(self, _timeout: float | None = None) -> None:
        """Returns at once; queued messages stay available to their readers."""
        self.native.close()

    def abandon(self) -> None:
        self.native.abandon()

    @property
    def label(self) -> str:
        """The queue's name, from its ring."""
        return self.segment.label

    @label.setter
    def label(self, label: str) -> None:
        self.segment.label = label

    @property
    def position(self) -> int:
        return self.native.position

    def statistics(self) -> QueueStatistics:
        """Returns what this end sees now; costs a few system calls per reader."""
        end = self.native
        messages, size, waits, spills = end.counters()
        published = participant(end, 0).slot.position
        is_writer = end.slot == 0
        return QueueStatistics(
            role="writer" if is_writer else "reader",
            rank=None if is_writer else end.ranks[end.slot - 1],
            pid=os.getpid(),
            messages=messages,
            bytes=size,
            waits=waits,
            spills=spills,
            readers=tuple(
                _reader_statistics(rank, participant(end, slot), published, end, self._chunk_bytes)
                for slot, rank in enumerate(end.ranks, start=1)
            ),
            skipped=0 if isinstance(end, RingWriter) else end.skipped,
        )


class LocalWriter(LocalEnd[RingWriter]):
    """The writer of a ring."""

    def __init__(
        self,
        geometry: RingGeometry,
        queue_id: bytes,
        ranks: Sequence[int],
        codec: Codec,
        max_extent_bytes: int,
        *,
        has_others: bool,
        has_late_readers: bool = False,
        is_latest: bool = False,
    ) -> None:
        """Creates a segment and its writer's end; leaves neither behind if it raises.

        `has_others`: the queue has readers that are not of this ring, so this end does not warn
        when all of its own have left.
        """
        segment = RingSegment.create(
            geometry,
            queue_id,
            name_of(queue_id),
            RESERVED_OF_LATEST if is_latest else RESERVED_CHUNK_BYTES,
            0,
            has_late_readers,
            is_latest,
        )
        self._has_late_readers = has_late_readers
        self._former_pids: set[int] = set()  # of readers whose places others have
        super().__init__(
            segment,
            geometry,
            lambda: RingWriter(segment, ranks, codec, max_extent_bytes, has_others),
        )
        self.sending: Sending = self.native
        self.send: Callable[[Any, float | None], None] = self.native.send
        self.send_many: Callable[[tuple[Any, ...], float | None, Burst], None] = (
            self.native.send_many
        )

    def close(self, _timeout: float | None = None) -> None:
        """Returns at once; logs which readers never attached, if messages were sent."""
        missed = self.absent(self.position)
        super().close()
        if missed:
            warn(
                "the queue was closed with messages that did not reach %s; wait_until_ready() "
                "waits for all readers",
                names_of(missed),
            )

    def block(self, owner: object, timeout: float | None) -> AbstractContextManager[memoryview]:
        return self.native.write_block(owner, timeout)

    def secrets_for(self, rank: int | None) -> list[str]:
        if rank is not None:
            if rank not in self.native.ranks:
                raise no_such_reader(rank, self.native.ranks)
            if self._who(rank).state == "closed":
                raise place_has_ended("reader", rank)
        return []

    # For a writer that also has remote readers; its thread may call these while the ring closes.

    def absent(self, sent: int | None = None) -> list[str]:
        """The readers that are expected, and have not attached; with `sent`, only those for whom
        there is one of so many messages."""
        rows = [] if self._has_late_readers else self._states()
        return [
            f"reader {rank} (never attached)"
            for rank, slot, state in rows
            if state == "absent"
            and (sent is None or participant(self.native, slot).slot.position < sent)
        ]

    def raise_death(self) -> None:
        """Raises ReaderDied if a reader died."""
        for _, slot, state in self._states():
            if state == "dead":
                raise failure(self.native, "peer_died", slot, None)

    def has_dead(self) -> bool:
        return any(state == "dead" for _, _, state in self._states())

    def note_absent_elsewhere(self, count: int) -> None:
        """Stores how many remote readers have yet to attach; local ends are not ready until 0."""
        with suppress(Closed):
            self.native.set_absent_elsewhere(count)

    def _states(self) -> list[tuple[int, int, str]]:
        """(rank, slot, state) of each reader; empty once this end is closed or forked."""
        with suppress(Closed, WrongProcess):
            return [
                (rank, slot, participant(self.native, slot).state)
                for slot, rank in enumerate(self.native.ranks, start=1)
            ]
        return []

    def release_reader(self, rank: int) -> None:
        if rank not in self.native.ranks:
            raise no_such_reader(rank, self.native.ranks)
        place = self.native.ranks.index(rank)
        if not self.native.release_reader(place):
            who = self._who(rank)
            if has_ended(who) and self.native.release_reader(place):
                return
            state = "attaching" if who.state == "absent" else f"{who.state} (pid {who.slot.pid})"
            raise InvalidArgument(
                f"reader {rank} is {state}: only a dead or absent reader can be released; end its "
                f"process first"
            )

    def readmit(self, rank: int) -> None:
        if rank not in self.native.ranks:
            raise no_such_reader(rank, self.native.ranks)
        who = self._who(rank)
        if who.is_of_here:
            self._former_pids.add(who.slot.pid)
        if not self.native.readmit(self.native.ranks.index(rank)):
            raise not_readmitted(rank, self._who(rank).state)

    def readmit_late(self, rank: int) -> bool:
        """Opens the place of a reader that has ended to one that counts once it has attached; at
        once, or (False) as the call under way ends. For a thread that makes no calls of this end.
        """
        who = self._who(rank)
        if who.is_of_here:
            self._former_pids.add(who.slot.pid)
        return self.native.readmit_late(self.native.ranks.index(rank))

    def pids(self) -> set[int]:
        return super().pids() | self._former_pids

    def _who(self, rank: int) -> Seen:
        return participant(self.native, 1 + self.native.ranks.index(rank))


def has_ended(who: Seen) -> bool:
    """Waits for a process that has begun to end: it holds its locks until the kernel has closed
    its files, one after the other. A second at most."""
    pid = who.slot.pid
    return who.is_of_here and is_ending(pid) and waits_for_its_end(pid, _LONGEST_END)


class LocalReader(LocalEnd[RingReader]):
    """A reader of a ring."""

    def __init__(self, ring: RingAddress, place: int) -> None:
        """Attaches to the ring as the reader at `place`; stays detached if it raises."""
        self.rank = rank = ring.ranks[place]
        self.geometry: RingGeometry | None = ring.geometry
        opening = ring.opening(place)
        at = ring.geometry, ring.name, ring.queue_id, 1 + place
        try:
            try:
                segment = RingSegment.attach(*at)
            except SegmentMissing:
                if ring.writer_file is None:
                    raise
                pid, file = ring.writer_file
                segment = RingSegment.attach_through(pid, file, *at)
            super().__init__(
                segment,
                ring.geometry,
                lambda: RingReader(segment, ring.ranks, ring.codec, place, opening, ring.origin),
            )
        except RankTaken as error:
            raise RankTaken(f"reader {rank} cannot attach: {error}") from None

    def receive(self, timeout: float | None, cancel: threading.Event | None, lends: bool) -> Any:
        """Returns the next message. In no call of C: after one, a signal handler could raise, and
        what was taken would be lost."""
        return self.native[timeout, cancel, lends]

    def receive_many(
        self, timeout: float | None, cancel: threading.Event | None, lends: bool, most: int
    ) -> list[Any]:
        objects: list[Any] = self.native[timeout, cancel, lends, most]  # as in `receive`
        return objects

    def view(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[Any]:
        return ViewBlock(owner, self.native, timeout, cancel)

    def block(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[memoryview]:
        return self.native.read_block(owner, timeout, cancel)


class ViewSource(Protocol):
    """A reader's end."""

    def __getitem__(self, how: tuple[float | None, threading.Event | None], /) -> Any:
        """Returns the next object by (timeout, cancel), and its lease; None in place of that if the
        object is a private copy. In no call of C: after one, a signal handler could raise."""


class ViewBlock:
    """Receives an object whose arrays stay in shared memory, with a lease on its chunk or extent.

    `owner` is the queue, kept alive so that its end is not freed during the block.
    """

    def __init__(
        self,
        owner: object,
        reader: ViewSource,
        timeout: float | None,
        cancel: threading.Event | None,
    ) -> None:
        self._owner = owner
        self._reader = reader
        self._wait = (timeout, cancel)
        self._value: Any = None
        self._lease: ViewLease | None = None

    def __enter__(self) -> Any:
        self._value, self._lease = self._reader[self._wait]
        return self._value

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        box, self._value = [self._value], None
        if kind is not None or self._lease is None:
            return  # an error takes precedence, and its traceback refers to the block's objects
        found = survivor(box, self._lease)
        box.clear()
        if found is not None and self._lease.is_held:
            raise view_in_use(found)


class SendsNothing:
    """The `Sending` of a writer that keeps no messages."""

    has_sent = False


class LonelyWriter:
    """The writer of a queue without readers: it discards messages and never waits."""

    segment = socket = None
    position = 0
    label = ""

    def __init__(self, max_chunk_bytes: int) -> None:
        self.sending: Sending = SendsNothing()
        self._max_chunk_bytes = max_chunk_bytes
        self._is_closed = False

    def check(self) -> None:
        if self._is_closed:
            raise Closed("this queue is closed")

    def send(self, _obj: Any, timeout: float | None) -> None:
        self._begin(timeout)

    def send_many(self, objects: tuple[Any, ...], timeout: float | None, burst: Burst) -> None:
        self._begin(timeout)
        burst.sent = len(objects)

    def wait_until_ready(self, timeout: float | None) -> None:
        self._begin(timeout)

    def wait_for_processes(self, timeout: float | None, _processes: Iterable[object]) -> None:
        self._begin(timeout)

    def _begin(self, timeout: float | None) -> None:
        seconds_of(timeout)
        self.check()

    def statistics(self) -> QueueStatistics:
        self.check()
        return QueueStatistics("writer", None, os.getpid(), 0, 0, 0, 0, ())

    def block(self, _owner: object, timeout: float | None) -> AbstractContextManager[memoryview]:
        self._begin(timeout)
        return nullcontext(memoryview(bytearray(self._max_chunk_bytes)))

    def note_work(self, _requests: bytes) -> None:
        """Nobody observes it."""

    def release_reader(self, rank: int) -> None:
        raise no_such_reader(rank, [])

    readmit = release_reader

    def secrets_for(self, rank: int | None) -> list[str]:
        if rank is not None:
            raise no_such_reader(rank, [])
        return []

    def close(self, _timeout: float | None = None) -> None:
        self._is_closed = True

    abandon = close

    def signal(self) -> Watching:
        return ShownWatch()

    def show_waiting(self, is_waiting: bool, is_first: bool) -> None:
        """Nothing waits for this end."""

    def stall_line(self, _waited: float) -> str | None:
        return None

    def timed_out(self, timeout: float | None) -> MemlaneError:
        raise NotImplementedError


def _reader_statistics(
    rank: int, who: Seen, published: int, end: RingWriter | RingReader, chunk_bytes: int
) -> ReaderStatistics:
    slot, was_here = who.slot, who.slot.pid != 0
    owes_nothing = who.state == "closed" or (end.has_late_readers and who.state == "absent")
    behind = 0 if owes_nothing else max(0, published - slot.position)
    views = 0 if who.state == "closed" else slot.views  # the writer no longer waits for them
    return ReaderStatistics(
        rank=rank,
        pid=slot.pid if was_here else None,
        state=who.state,
        behind=min(behind, 1) if end.is_latest else behind,
        last_progress=slot.last_progress / 1e9 if was_here else None,
        is_waiting=who.state in ("running", "stopped", "unknown") and slot.activity == "waiting",
        views=views,
        views_since=slot.views_since / 1e9 if views else None,
        skipped=slot.skipped,
        # Of the latest, all that is kept is in `leased_bytes`.
        lent=slot.leased_bytes + (0 if end.is_latest else views * chunk_bytes),
    )


def no_such_reader(rank: int, ranks: Sequence[int]) -> InvalidArgument:
    return InvalidArgument(f"the queue has no reader {rank}: its ranks are {list(ranks)}")


def place_has_ended(role: str, rank: int) -> InvalidArgument:
    return InvalidArgument(
        f"{role} {rank} has closed or was released: nobody can attach in its place until "
        f"readmit({rank}) returns a new handle"
    )
