"""Attaches a reader on another host: alone, relaying, or behind a relay of its host."""

from __future__ import annotations

import hashlib
import logging
import os
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import NEVER, Deadline
from memlane._base.diagnosis import failure, participant
from memlane._base.lifetime import undone_by
from memlane.broadcast.local import LocalReader, ViewBlock
from memlane.broadcast.network.reader import NetworkReader
from memlane.broadcast.network.relay import Relay, address_of, named
from memlane.broadcast.protocol.frames import ReportRow, Ring
from memlane.broadcast.protocol.places import usual_place
from memlane.broadcast.protocol.reader_session import PlaceTaken
from memlane.broadcast.watching import JointWatch
from memlane.errors import (
    Cancelled,
    Closed,
    InvalidArgument,
    InvalidType,
    LayoutMismatch,
    MemlaneError,
    RankTaken,
    SegmentMissing,
    SegmentRefused,
    ShmExhausted,
    SystemFault,
    TimedOut,
    WriterDied,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from memlane._native import RingReader
    from memlane.broadcast.handle import RingAddress
    from memlane.broadcast.local import ReaderEnd
    from memlane.broadcast.options import NetworkAddress
    from memlane.broadcast.statistics import QueueStatistics
    from memlane.broadcast.watching import Watching

logger = logging.getLogger("memlane")

# Errors that make a reader use its own connection instead of a ring shared on its host.
_NO_RING = (
    SegmentMissing,
    SegmentRefused,
    LayoutMismatch,
    ShmExhausted,
    SystemFault,
    InvalidArgument,
)


def remote_reader(writer: NetworkAddress, rank: int, timeout: float | None) -> ReaderEnd:
    """Attaches a reader on another host than its writer: over its own connection, or to its host's
    ring, for which it may have to relay. Stays detached if it raises."""
    deadline = Deadline(timeout)
    stream = _stream_of(writer, rank, deadline)
    with undone_by(stream.abandon):
        if (ring := stream.session.ring) is not None:
            try:
                if not (has_relay := bool(ring.name)):
                    ring = named(ring)
                there = address_of(ring, writer, stream.session.writer_pid)
                if has_relay:
                    return _reader_behind(stream, there, ring, deadline)
                relay = Relay(stream, there, ring)
                with undone_by(relay.ring.abandon):
                    return RelayingReader(relay, ring.place, stream)
            except _NO_RING as error:
                logger.warning("reader %d reads over its own connection: %s", rank, error)
                stream.go_alone(0)
                stream.until_welcome(deadline)
        return stream


def _stream_of(writer: NetworkAddress, rank: int, deadline: Deadline) -> NetworkReader:
    """Attaches reader `rank` at the first free place, trying its usual one first."""
    secrets = writer.secrets
    if not secrets:
        raise InvalidArgument(
            f"the handle has no network key, because it was exported for a local reader; attach "
            f"with export_handle({rank})"
        )
    host = where_memory_is_shared()
    first = min(usual_place(rank, writer.local_ranks), len(secrets) - 1)
    refused: PlaceTaken | None = None
    for secret in (*secrets[first:], *secrets[:first]):
        try:
            return NetworkReader(writer, rank, secret, host, deadline)
        except PlaceTaken as error:
            refused = refused or error  # the first says why the usual place cannot be had
    if len(secrets) > 1:
        raise RankTaken(
            f"reader {rank} cannot attach: the queue has {writer.places} remote readers, "
            f"and all of their places are taken: {refused}"
        )
    raise RankTaken(f"reader {rank} cannot attach: {refused}")


def where_memory_is_shared() -> str:
    """A hash of the kernel's boot id, the device of /dev/shm and the user. Processes with equal
    hashes may share segments, which attaching then tests. Empty if it cannot be determined."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        device = os.stat("/dev/shm").st_dev
    except OSError:
        return ""
    return hashlib.sha256(f"{boot} {device} {os.geteuid()}".encode()).hexdigest()[:32]


def _reader_behind(
    stream: NetworkReader, there: RingAddress, ring: Ring, deadline: Deadline
) -> SharedReader:
    """Attaches to the ring of another reader's relay; returns once the writer knows of it."""
    try:
        reader = SharedReader(there, ring.place, stream)
    except RankTaken as error:  # taken by a reader that died before the writer knew of it
        raise SegmentRefused(str(error)) from None
    with undone_by(reader.native.abandon):
        if participant(reader.native, 0).state == "dead":
            raise SegmentMissing(ring.name, "its relay has died, and the writer does not know yet")
        here = [ReportRow(ring.place, os.getpid(), "running", 0)]
        if not stream.attach_at(ring, here, deadline):
            raise SegmentMissing(ring.name, "its relay has ended")
    return reader


def _position(native: RingReader) -> int | None:
    """Messages that the reader has taken from its ring; None once closed. Thread-safe."""
    with suppress(Closed):
        return participant(native, native.slot).slot.position
    return None


class _Parting:
    """Cancels a wait for the ring when its relay is gone, or as the caller asks."""

    def __init__(
        self, has_parted: Callable[[], bool], cancel: threading.Event | None = None
    ) -> None:
        if cancel is not None and not hasattr(cancel, "is_set"):
            raise InvalidType("cancel must be a threading.Event or None")
        self._has_parted, self._cancel = has_parted, cancel

    def is_set(self) -> bool:
        return self._has_parted() or (self._cancel is not None and self._cancel.is_set())


class SharedReader(LocalReader):
    """Reads from its relay's ring; when the relay ends, over the connection that it has kept."""

    def __init__(self, ring: RingAddress, place: int, stream: NetworkReader) -> None:
        super().__init__(ring, place)
        self.socket = stream.socket
        self._stream = stream
        stream.follow(partial(_position, self.native))
        self._alone: NetworkReader | None = None
        self._parting = _Parting(self._has_parted)
        self._watch: JointWatch | None = None
        self._look = stream.bound / 2  # seconds between looks at the relay while it is not ready

    def _go_on(self, error: MemlaneError) -> NetworkReader:
        """The ring is dead, or its relay too slow: requests a stream from the first message not
        read there."""
        if self._alone is None:
            why = error if isinstance(error, WriterDied) else "its relay does not report"
            logger.warning("reader %d reads over its own connection: %s", self.rank, why)
            self._stream.go_alone(self.native.position, self.native.counters()[1])
            if self._watch is not None:
                self._watch.become(self._stream.watch())
            self._alone = self._stream
            self.native.abandon()
        return self._alone

    def check(self) -> None:
        if self._alone is None:
            super().check()
        else:
            self._alone.check()

    def watch(self) -> Watching:
        if self._watch is None:
            if self._alone is None:
                self._watch = JointWatch(self.native.watch(), *self._may_follow())
            else:
                self._watch = JointWatch(self._alone.watch())
        return self._watch

    signal = watch

    def _may_follow(self) -> tuple[Watching, ...]:
        """Returns what may be ready while the ring is not: the stream, once the relay is gone."""
        return (self._stream.watch(),)

    def show_waiting(self, is_waiting: bool, is_first: bool) -> None:
        if self._alone is None:
            super().show_waiting(is_waiting, is_first)
        else:
            self._alone.incoming.count_wait(is_waiting and is_first)  # and its thread receives

    def timed_out(self, timeout: float | None) -> MemlaneError:
        alone = self._alone
        return super().timed_out(timeout) if alone is None else alone.timed_out(timeout)

    def wait_until_ready(self, timeout: float | None) -> None:
        deadline = Deadline(timeout)
        while self._alone is None:
            left = deadline.left()
            try:
                self.native.wait_until_ready(min(left, self._look))
                return
            except TimedOut as error:
                if self._has_parted():
                    self._go_on(error)
                elif left <= self._look:
                    raise failure(self.native, "not_ready", 0, timeout) from None
            except WriterDied as error:
                self._go_on(error)
        self._alone.wait_until_ready_by(deadline)

    def _has_parted(self) -> bool:
        """Returns whether the writer has said that the relay is gone, although the ring is not
        dead."""
        return not self._stream.session.is_behind

    def _after_ring(self, error: Cancelled | WriterDied) -> NetworkReader:
        """A call of the ring's reader has raised this: goes on alone, or raises it."""
        if isinstance(error, Cancelled) and not self._has_parted():
            raise error
        return self._go_on(error)

    def _until_parted(self, cancel: threading.Event | None) -> Any:
        """Returns the `cancel` of a call of the ring's reader."""
        return self._parting if cancel is None else _Parting(self._has_parted, cancel)

    def receive(self, timeout: float | None, cancel: threading.Event | None, lends: bool) -> Any:
        deadline = NEVER if timeout is None else Deadline(timeout)
        alone = self._alone
        if alone is None:
            try:
                return self.native[timeout, self._until_parted(cancel), lends]
            except (Cancelled, WriterDied) as error:
                alone = self._after_ring(error)
        return alone.ahead.receive_by(deadline, cancel)

    def receive_many(
        self, timeout: float | None, cancel: threading.Event | None, lends: bool, most: int
    ) -> list[Any]:
        deadline = NEVER if timeout is None else Deadline(timeout)
        alone = self._alone
        if alone is None:
            try:
                objects: list[Any] = self.native[timeout, self._until_parted(cancel), lends, most]
                return objects
            except (Cancelled, WriterDied) as error:
                alone = self._after_ring(error)
        return [alone.ahead.receive_by(deadline, cancel)]

    def __getitem__(self, how: tuple[float | None, threading.Event | None]) -> Any:
        """Does as `RingReader`; messages from the network are private and need no lease."""
        timeout, cancel = how
        deadline = NEVER if timeout is None else Deadline(timeout)
        alone = self._alone
        if alone is None:
            try:
                return self.native[timeout, self._until_parted(cancel)]
            except (Cancelled, WriterDied) as error:
                alone = self._after_ring(error)
        return alone.ahead.receive_by(deadline, cancel), None

    def view(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[Any]:
        return ViewBlock(owner, self, timeout, cancel)

    def block(
        self, owner: object, timeout: float | None, cancel: threading.Event | None
    ) -> AbstractContextManager[memoryview]:
        """Refused as for every remote reader: the writer's raw bytes stay on its host."""
        return self._stream.block(owner, timeout, cancel)

    @property
    def position(self) -> int:
        return self.native.position if self._alone is None else 0

    def statistics(self) -> QueueStatistics:
        return super().statistics() if self._alone is None else self._alone.statistics()

    def close(self, timeout: float | None = None) -> None:
        try:
            super().close()
        finally:
            self._leave(timeout)

    def _leave(self, timeout: float | None) -> None:
        """Ends the connection after this reader has closed."""
        self._stream.close(timeout)

    def abandon(self) -> None:
        super().abandon()
        self._stream.abandon()


class RelayingReader(SharedReader):
    """The reader whose process runs the relay; it reads from the ring like the others."""

    def __init__(self, relay: Relay, place: int, stream: NetworkReader) -> None:
        super().__init__(relay.address, place, stream)
        self._relay = relay
        with undone_by(self.native.abandon):
            relay.start()

    def _has_parted(self) -> bool:
        return False  # that is for the other readers of the ring

    def _may_follow(self) -> tuple[Watching, ...]:
        return ()  # the relay's, until that has failed

    def _go_on(self, error: MemlaneError) -> NetworkReader:
        if not self._relay.has_failed:  # the stream has ended as well
            raise self._stream.session.connection.failure or error from None
        return super()._go_on(error)

    def _leave(self, timeout: float | None) -> None:
        self._relay.leave(timeout)

    def abandon(self) -> None:
        self._relay.abandon()  # the ring first: the relay's thread still uses the stream
        super().abandon()
