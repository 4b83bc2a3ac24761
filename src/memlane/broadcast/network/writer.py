"""The writer's end towards readers on other hosts, with or without readers on its own."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack, suppress
from math import inf
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import Deadline
from memlane._base.diagnosis import blocked, deserted
from memlane._base.lifetime import undone_by
from memlane._base.naming import names_of
from memlane._base.serialization import Codec
from memlane._native import RingGeometry
from memlane._net.contexts import need_curve
from memlane._net.sockets import can_receive
from memlane.broadcast.local import LocalWriter
from memlane.broadcast.network.awaited import FULL, AwaitedRoom
from memlane.broadcast.network.driver import SLICE, NetworkEnd, logger
from memlane.broadcast.network.here import Here
from memlane.broadcast.network.keys import Keys
from memlane.broadcast.network.peer_table import PeerTable, ShownReaders
from memlane.broadcast.network.sending import Sending
from memlane.broadcast.network.transport import (
    Listening,
    begin_lending,
    checked_host,
    end_lending,
)
from memlane.broadcast.protocol.writer_session import WriterSession
from memlane.broadcast.starting import Starting
from memlane.broadcast.statistics import QueueStatistics
from memlane.errors import CorruptMessage, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memlane._native import Burst
    from memlane.broadcast.handle import Handle
    from memlane.broadcast.options import RemoteOptions


RECENT = 0.1  # seconds after a call read readers' frames: these need not wake the thread yet
_LOOKS = 6  # at every connection, within the bound
_LONGEST_PAUSE = 0.5
_MOVED = 2048  # bytes a second that a host receives: less may be only repeated frames


class NetworkWriter(NetworkEnd):
    """Sends every message to every reader, and keeps it until all have taken it.

    Args:
        local: the ring of the readers on this host, which get every message first; None: there are
            none.
        n_remote: how many readers are expected from other hosts.
        local_ranks: ranks that are not among them.
        options: as `MessageQueue` documents them.
        queue_id: in hexadecimal.
        geometry: of the rings of relays, and of this host's.
        codec: encodes each message once, for the ring and the network.

    A message costs one copy (none for bytes), shared by all remote readers, and one handover per
    reader to the I/O thread, which encrypts and sends; small ones back to back share a frame.
    `send` finds room everywhere before it sends anything: first in every window, where it stays
    free because nobody else sends, then in the ring. A reader with a full window in flight is
    waited for; nothing is ever dropped.
    """

    transport: Listening

    def __init__(
        self,
        local: LocalWriter | None,
        n_remote: int,
        local_ranks: list[int],
        options: RemoteOptions,
        queue_id: str,
        geometry: RingGeometry,
        codec: Codec,
    ) -> None:
        host = checked_host(options.connect_ip)
        table = PeerTable(
            RingGeometry(n_remote, geometry.max_chunk_bytes, options.window),
            bytes.fromhex(queue_id),
            is_writer=True,
            has_late_readers=options.late_readers,
        )
        super().__init__("writer", table)
        self.options, self.bound = options, options.liveness
        self.segment = None if local is None else local.segment
        self._has_told = False  # that nobody reads any more
        self._lends = False
        self._served_at = 0.0  # when readers' frames were last read
        self._look_at: float | None = None  # when connections are looked at for floods
        self._here = Here(local)
        with self._opening():
            self.keys = Keys(n_remote, insecure=options.insecure)
            self.session = WriterSession(
                n_remote,
                local_ranks,
                options,
                queue_id,
                int.from_bytes(os.urandom(8), "little"),
                os.getpid(),
                (geometry.max_chunk_bytes, geometry.max_chunks),
                self.keys.ticket_of_token,
            )
            self.transport = Listening(self._context, self.keys, n_remote, host, options)
            self.socket = self.transport.socket
            self.sending = Sending(self, self.session, self.transport, local, codec)
            self.awaited = AwaitedRoom(self, self.session, self.sending, local)
            self.shown_readers = ShownReaders(table, self.session, self.sending)
            self.send, self.block = self.sending.send, self.sending.block
            self.signal, self.show_waiting = self.awaited.signal, self.awaited.show_waiting
            self.timed_out, self.stall_line = self.awaited.timed_out, self.awaited.stall_line
            begin_lending()
            self._lends = True
            self._call_poller = self._poller(self.transport.readable)
            quiet = (*self.transport.quiet, self._waker.descriptor, self.sending.batch.fileno())
            # By whether a call has just read frames, and whether a look at connections is due.
            # Beside calls, which look themselves, a wake-up would only take the GIL from them.
            self._pollers = {
                (False, False): self._poller(
                    *quiet, self.transport.readable, self.transport.arrivals
                ),
                (False, True): self._poller(*quiet, self.transport.readable),
                (True, False): self._poller(*quiet),
                (True, True): self._poller(*quiet),
            }
            self._here.note_absent_elsewhere(n_remote)
            self._start_thread()

    @property
    def label(self) -> str:
        """The queue's name, here and on other hosts."""
        ring = self._here.ring
        return self.table.label if ring is None else ring.label

    @label.setter
    def label(self, label: str) -> None:
        with self.locked():
            self.table.label = label
        if self._here.ring is not None:
            self._here.ring.label = label

    @property
    def position(self) -> int:
        return self.sending.position

    # Sending ----------------------------------------------------------------------------------

    def send_batch(self) -> None:
        try:
            with self.lock:
                if not self._closed:
                    self.sending.send_batch()
        finally:
            if self._was_closed_here:  # by a signal handler
                self._close()

    def send_many(self, objects: tuple[Any, ...], timeout: float | None, burst: Burst) -> None:
        deadline = Deadline(timeout)
        send = self.send
        for obj in objects:
            send(obj, deadline.timeout_left())
            burst.sent += 1  # no call before it, after which a signal handler could raise

    def wait_for_room(self, size: int, deadline: Deadline) -> None:
        session = self.session
        self.shown_readers.note_refused(size)
        self._wait(
            lambda: session.has_room(size),
            deadline,
            lambda: session.outbox.in_the_way(size, time.monotonic()),
            FULL,
        )

    def _show(self, now: float) -> None:
        if not self._closed:
            self.shown_readers.show(now, is_awaited=self.awaited.is_awaited)

    def is_recent(self) -> bool:
        return time.monotonic() - self._served_at < RECENT / 2

    def look(self, *, is_late: bool) -> None:
        self._served_at = now = time.monotonic()
        self._hear()
        if is_late:
            self.transport.shut_flooding(now)
        if not self._has_told:
            self._note_desertion(now)

    def _note_desertion(self, now: float) -> None:
        """Logs once that nobody reads any more. Only after a second, because a writer may be about
        to end as its readers did."""
        since = self.session.places.deserted_since()
        here = None if since is None else self._here.deserted()
        if since is None or here is None:
            return
        since, ranks = max(since, here[0]), here[1]
        ranks += [peer.rank_or_usual for peer in self.session.places.peers]
        if now - since >= 1.0:
            self._has_told = True
            logger.warning("%s", deserted(ranks, now - since))

    # Receiving --------------------------------------------------------------------------------

    def _hear(self) -> None:
        """Reads and answers the frames that readers have sent, with the lock held."""
        self.sending.begin_receiving()
        session, now = self.session, time.monotonic()
        for route, frame, place, connection in self.transport.hear():
            if connection is not None:  # before the session knows of it: a handler may raise
                self.transport.connections[route] = connection
                self.sending.forget_room()  # the taker of a released place has a window, too
            try:
                address = "an unknown address" if connection is None else connection.peer
                line = session.heard(route, frame, now, place, address)
            except CorruptMessage:
                line = None  # from a stranger, or from an expected reader that is broken
            if line is not None:
                logger.warning("%s", line)
            if connection is not None and not session.is_known(route):
                self.transport.connections.pop(route, None)
        if session.readiness.is_asked:
            session.readiness.answer(self._here.absent(), now)
        self.sending.end_receiving()
        self._here.note_absent_elsewhere(session.count_absent())
        if self.awaited.is_awaited:
            self.awaited.show()

    def _absent(self) -> str:
        """The readers that have not attached, here and elsewhere."""
        session, here = self.session, self._here.absent()
        return names_of(session.places.absent_texts(here, session.outbox.next, time.monotonic()))

    def _judge(self) -> float | None:
        """Checks every connection; returns when to check again."""
        session, transport, now = self.session, self.transport, time.monotonic()
        self._note_time()
        self._show(now)
        self._look_at = transport.shut_flooding(now)
        for route in session.places.connections():
            connection = transport.connections.get(route)
            if connection is None or not connection.is_open:
                session.lost(route, now)
            elif connection.is_silent(self.options.liveness):
                why = f"its host has not answered for {self.options.liveness} s"
                session.silent(route, why, now)
        for route in session.places.talkative():
            connection = transport.connections.get(route)
            if connection is not None and connection.is_drained():
                session.drained(route)
        due = session.tick(now)
        self.sending.flush()
        if session.has_dead():
            self.sending.forget_room()  # so that the next call looks, and raises
        ends = [due, self._look_at, now if transport.has_more else None]
        if session.places.connections() or session.places.has_lost():
            ends.append(now + min(self.options.liveness / _LOOKS, _LONGEST_PAUSE))
        return min((end for end in ends if end is not None), default=None)

    def _tick(self) -> float | None:
        if self._closed:  # the thread, which admits readers that reconnect, has ended
            return self._answer()
        self._served_at = time.monotonic()
        self._hear()
        return self._judge()

    def _answer(self, *, readers: bool = True) -> float | None:
        """Does what is due; returns when more is due."""
        self.sending.recover()
        now = time.monotonic()
        session, transport = self.session, self.transport
        for route in transport.reap_unidentified():
            session.lost(route, now)
        for ticket in transport.accept_authenticated():
            session.authenticated(ticket, now)
        if readers:
            self._hear()
        self._announce_ready()  # before END, which `_judge` sends
        return self._judge()

    def _announce_ready(self) -> None:
        session = self.session
        is_known = session.readiness.is_everybody_here
        if not (is_known or session.count_absent() or self._here.absent()):
            session.readiness.announce()

    def _delay_clocks(self, seconds: float, now: float) -> None:
        self.session.delay_clocks(seconds, now)

    def _is_doubting(self) -> bool:
        return self.session.places.has_lost()

    def _serve(self) -> None:
        with self.lock:
            self._waker.clear()
            now = time.monotonic()
            awaited = self.awaited
            was_recent = now - self._served_at < RECENT and not awaited.is_awaited
            due = self._answer(readers=not was_recent or self.transport.has_more)
            if not self.session.readiness.is_everybody_here and not self.session.count_absent():
                due = now + SLICE  # local readers do not notify this thread
            if was_recent:
                due = now + RECENT if due is None else min(due, now + RECENT)
            poller = self._pollers[was_recent, self._look_at is not None]
            if awaited.is_awaited:
                awaited.show()
                if can_receive(self.transport.socket):  # sending may have consumed its signal
                    due = now
                elif self._here.ring is not None:  # with room, the ring does not report its deaths
                    due = min(due or inf, now + _LONGEST_PAUSE)
                if (ring := awaited.ring_in_the_way()) is not None:
                    known = *self.transport.quiet, self._waker.descriptor, self.transport.readable
                    arrivals = () if self._look_at is not None else (self.transport.arrivals,)
                    poller = self._poller(*known, ring.fileno(), *arrivals)
        pause = None if due is None else max(0.0, due - time.monotonic())
        self._sleep(poller, pause)

    # Waiting ----------------------------------------------------------------------------------

    def is_set(self) -> bool:
        """Polled while the same call waits for the ring: raises if a remote reader has died."""
        with self.lock:
            self._tick()
            self.check()
            self.session.places.raise_death()
        return False

    def _wait(
        self,
        is_ready: Callable[[], bool],
        deadline: Deadline,
        who: Callable[[], str],
        reason: str,
        starting: Starting | None = None,
    ) -> None:
        """Waits until `is_ready` holds; raises if a reader dies, or a process of `starting`."""
        poller = None
        if starting is not None:
            poller = self._poller(self.transport.readable)
            starting.wake(poller)

        def ready() -> bool | None:
            self.check()
            self.session.places.raise_death()
            self._here.raise_death()
            if is_ready():
                return True
            if starting is not None:
                starting.is_set()
            return None

        def line(waited: float) -> str:
            return blocked("writer", waited, reason, who(), self.label)

        self.show_wait("waiting" if reason is FULL else "attaching")
        try:
            self.wait(ready, deadline, who, stall_line=line, poller=poller)
        finally:
            self.show_wait("elsewhere")

    def wait_for_processes(self, timeout: float | None, processes: Iterable[object]) -> None:
        """Is `wait_until_ready`, and raises ReaderDied if one of them ends before it attaches."""
        with Starting(self._pids, processes) as starting:
            self.wait_until_ready(timeout, starting)

    def _pids(self) -> set[int]:
        """Returns the pids of all readers that have ever attached; some may be of other hosts."""
        with self.lock:
            return self._here.pids() | self.session.places.pids()

    def wait_until_ready(self, timeout: float | None, starting: Starting | None = None) -> None:
        deadline = Deadline(timeout)
        with self.guard:
            self.sending.begin()
            self._wait(
                lambda: not self.session.count_absent(),
                deadline,
                self._absent,
                "not all readers have attached to the queue",
                starting,
            )
            self._here.wait_until_ready(deadline, timeout, self, starting)
        with self.guard, self.lock:  # now: the thread would do it, but ends with close()
            self._announce_ready()
            self.sending.flush()

    # The rest ---------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Closes the ring and the network, even if one of them raises."""
        try:
            self._here.close()
        finally:
            super().close(timeout)

    def abandon(self) -> None:
        try:
            self._here.abandon()
        finally:
            super().abandon()

    def statistics(self) -> QueueStatistics:
        with self.locked() as is_free:
            if is_free:
                self._hear()
                self.awaited.look_again()
            sent, nbytes = self.session.outbox.next, self.session.outbox.bytes
            rows = self.session.places.statistics(sent)
        here, waits, spills = self._here.statistics()
        waits, rows = waits + self.sending.waits, here + rows
        return QueueStatistics("writer", None, os.getpid(), sent, nbytes, waits, spills, rows)

    def secrets_for(self, rank: int | None) -> list[str]:
        """The secret of the place that is kept for `rank` from now on; None: all secrets."""
        if (ring := self._here.ring_of(rank)) is not None:
            return ring.secrets_for(rank)
        secrets = self.keys.reader_secrets
        with self.locked():
            self.sending.forget_room()  # as in `_hear`
            if rank is None:
                return list(secrets)
            return [secrets[self.session.keep_place(rank, time.monotonic(), self.keys.renew)]]

    def expect_unshared(self, ranks: Iterable[int]) -> None:
        """Each of those readers has a host of its own, so it needs no relay."""
        with self.locked():
            for rank in ranks:
                now = time.monotonic()
                self.session.keep_place(rank, now, self.keys.renew, is_unshared=True)

    def release_reader(self, rank: int) -> None:
        """Goes on without a reader that is dead or absent."""
        if (ring := self._here.ring_of(rank)) is not None:
            with self.guard:
                ring.release_reader(rank)
            return
        with self.guard, self.lock:
            self.sending.flush()
            self.session.release(rank, time.monotonic())
            self.awaited.look_again()

    def readmit(self, rank: int) -> None:
        """Opens the place of a reader that has closed or was released to another process."""
        if (ring := self._here.ring_of(rank)) is not None:
            with self.guard:
                ring.readmit(rank)
            return
        with self.guard, self.lock:
            self._hear()  # that it has closed, perhaps
            self.session.readmit(rank, time.monotonic(), self.keys.renew)
            self.awaited.look_again()

    def _drain(self) -> float:
        """Waits until every reader has confirmed END, as long as any of them makes progress."""
        with self.lock:  # from now on nobody opens the batch
            self.sending.take_batch()
        session, ending, started = self.session, self.session.ending, time.monotonic()
        moved = int(_MOVED * max(1.0, self.options.liveness))
        ending.begin(started)

        def over() -> bool | None:
            for route in session.places.connections():
                connection = self.transport.connections.get(route)
                if connection is not None and (nbytes := connection.moved(moved)):
                    session.moved(route, nbytes, time.monotonic())
            return not ending.unfinished() or ending.is_stuck(self.ran_at) or None

        def line(waited: float) -> str:
            names = names_of(ending.texts(ending.unfinished(), time.monotonic()))
            why = "messages are unread"
            return blocked("close() of the writer", waited, why, names, self.table.label)

        poller = self._pollers[False, True]
        poller.unregister(self._closing_event)
        with suppress(TimedOut):
            self.wait(over, self._deadline, str, stall_line=line, poller=poller)
        missed = ending.missed()
        if missed:
            now = time.monotonic()
            names, waited = names_of(ending.texts(missed, now)), now - started
            ranks = tuple(peer.rank_or_usual for peer in missed)
            raise TimedOut(
                f"closed after {waited:.1f} s, but {names} did not confirm receiving all messages",
                waited,
                ranks,
            )
        return 0.0

    def _free(self, linger: float = 0.0) -> None:
        super()._free(linger)
        if self._lends:
            self._lends = False
            self.sending.batch.close()
            end_lending()


def writer_with_remote_readers(
    handle: Handle,
    geometry: RingGeometry,
    codec: Codec,
    keep_bytes: int,
    n_remote: int,
    options: RemoteOptions,
) -> NetworkWriter:
    """Creates the writer's end and completes its handle; leaves nothing open if it raises."""
    if not options.insecure:
        need_curve()
    ranks = handle.local_reader_ranks
    with ExitStack() as undo:
        local = None
        if ranks:
            queue_id = bytes.fromhex(handle.queue_id)
            local = LocalWriter(
                geometry,
                queue_id,
                ranks,
                codec,
                keep_bytes,
                has_others=True,
                has_late_readers=options.late_readers,
            )
            undo.enter_context(undone_by(local.abandon))
        writer = NetworkWriter(local, n_remote, ranks, options, handle.queue_id, geometry, codec)
    endpoint = writer.transport.endpoint
    if options.insecure:
        logger.warning(
            "the queue at %s neither encrypts nor authenticates "
            "(insecure_network=True): anyone on the network can read and send messages",
            endpoint.text,
        )
    handle._note_network(endpoint, n_remote, options.liveness, writer.keys.server_key)
    return writer
