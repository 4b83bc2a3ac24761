"""The writer's end towards readers on other hosts."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import zmq
from zmq.utils.monitor import parse_monitor_message

from memlane._failures import MOST_NAMED, names_of
from memlane.broadcast.remote import address, attending, doorstep, lending, lingering, tcp
from memlane.broadcast.remote.end import (
    SLICE,
    RemoteEnd,
    Stall,
    deadline_of,
    logger,
    remaining,
)
from memlane.broadcast.remote.outbox import Message, Outbox, Piece
from memlane.broadcast.remote.peer import Peer
from memlane.broadcast.remote.places import Keys, Porter
from memlane.broadcast.remote.sockets import LAST, MORE, can_receive, receive, send, signal_of
from memlane.broadcast.remote.windows import Windows
from memlane.broadcast.remote.wire import SMALL, Header, What, control, whole_header
from memlane.errors import CorruptMessage, TimedOut

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane._native import Encoder, RingGeometry
    from memlane.broadcast.remote.options import RemoteOptions
    from memlane.broadcast.statistics import ReaderStatistics

# A call of the application that came so recently has read what readers said, so their
# acknowledgements need not wake the thread.
RECENT = 0.1
_MOST_AT_ONCE = 1000  # frames that are read before somebody else gets the lock


class RemoteWriter(RemoteEnd):
    """Sends every message to every reader, and keeps it until all have taken it.

    Args:
        places: how many readers are expected.
        local_ranks: ranks that are not among them.
        options: as `MessageQueue` documents them.
        queue_id: in hexadecimal.
        geometry: of the rings of relays.

    A message costs one copy (bytes none), shared by all readers, and each reader one handing over
    to the I/O thread, which encrypts and sends. A reader that has a full window in flight is
    waited for; nothing is ever dropped.
    """

    def __init__(
        self,
        places: int,
        local_ranks: list[int],
        options: RemoteOptions,
        queue_id: str,
        geometry: RingGeometry,
    ) -> None:
        host = address.checked_host(options.connect_ip)
        super().__init__("writer")
        self.geometry = geometry
        lending.begin()
        with self._opening():
            self._open(places, local_ranks, options, queue_id, host)

    def _open(
        self, places: int, local_ranks: list[int], options: RemoteOptions, queue_id: str, host: str
    ) -> None:
        self.options = options
        self.local_ranks = local_ranks
        self.queue_id = queue_id
        self.keys = Keys(places, insecure=options.insecure)
        self.peers = [Peer(place) for place in range(places)]
        self.epoch = int.from_bytes(os.urandom(8), "little")
        self.outbox = Outbox()
        self.windows = Windows(self.peers, self.outbox, options.window, options.window_bytes)
        self.waits = 0
        self.is_torn = False  # a signal handler has raised in between
        self._credit = 0  # messages, and
        self.room = -1  # bytes that may be sent without another look, -1: none
        self.everybody_is_here = self._is_ending = False
        self.absent_here: Callable[[], list[str]] = list
        self._find_dead_here: Callable[[], None] = lambda: None
        self._tell_here: Callable[[int], None] = lambda _absent: None
        self._porter = Porter(self._context, self.keys)
        self.socket = address.listener(self._context, self.keys, options.liveness)
        self._monitor = self._monitor_of(self.socket, doorstep.EVENTS)
        self.endpoint = address.bind(self.socket, host, on_all=options.listen_on_all)
        self._doorstep = doorstep.Doorstep(places, self.endpoint.port)
        self._readers_fd = signal_of(self.socket)
        self._call_poller = self._poller(self._readers_fd)
        self._quiet = (signal_of(self._porter.socket), signal_of(self._monitor))
        self._quiet_poller = self._poller(*self._quiet)
        self._full_poller = self._poller(*self._quiet, self._readers_fd)
        if options.insecure:
            logger.warning(
                "the queue at %s neither encrypts nor checks who reads or writes "
                "(insecure_network=True): whoever reaches the network can read along and send",
                self.endpoint.text,
            )
        self._start_thread()

    def live_beside(
        self,
        absent_here: Callable[[], list[str]],
        find_dead_here: Callable[[], None],
        tell_here: Callable[[int], None],
    ) -> None:
        """There are local readers, too: names who is absent, raises for the dead, tells them how
        many are absent elsewhere."""
        with self._lock:
            self.absent_here = absent_here
            self._find_dead_here = find_dead_here
            self._tell_here = tell_here
            self.note_attendance()

    def note_attendance(self) -> None:
        """Somebody has attached, or is not expected any more."""
        self._tell_here(len(self.absent()))

    # Sending ----------------------------------------------------------------------------------

    def reserve(self, size: int, deadline: float | None, timeout: float | None) -> bool:
        """Returns when `size` bytes more may be in flight to every reader; whether it had to wait.

        Raises:
            ReaderDied: one of them died.
            TimedOut: it names those that are behind.
        """
        with self._lock:
            if not self._died() and self.windows.has_room(size):
                return False
        self.waits += 1
        self._wait(
            lambda: self.windows.has_room(size),
            deadline,
            timeout,
            lambda: [self._text(peer) for peer in self.windows.in_the_way(size)],
            ": No available shared memory broadcast block",
        )
        return True

    def publish(self, pieces: list[Piece], size: int) -> None:
        """Hands the next message over to every reader that is there."""
        with self._lock:
            self.is_torn = True  # until this is over: a signal handler may raise anywhere
            message = self.outbox.add(size, pieces)
            for peer in self.peers:
                if peer.connection is not None:
                    self._send_message(peer, message)
            self.is_torn = False
            self._settle(size)

    def publish_small(self, encoder: Encoder, size: int) -> None:
        """The same for a message that fits `room` and goes in one piece, by the shortest way."""
        with self._lock:
            header = whole_header(self.epoch, self.outbox.next, encoder.kind, size)
            frame = encoder.joined(header)
            self.is_torn = True
            self.outbox.add(size, [Piece(frame)])
            for peer in self.peers:
                if peer.connection is not None:
                    try:
                        send(self.socket, peer.route, MORE)
                        send(self.socket, frame, LAST)
                    except zmq.ZMQError as error:
                        attending.lose_by(error, peer)
            self.is_torn = False
            self._settle(size)

    def mend(self) -> None:
        """If a signal handler has raised while frames were sent or heard."""
        with self._lock:
            if self.is_torn:
                self.room = -1  # what was sent may not have been counted
                attending.begin_all_again(self)
                self.is_torn = False

    def _settle(self, size: int) -> None:
        """After a message. What readers say of small ones can wait until room is short; but where
        the thread sleeps, sending may have taken the signal that it sleeps for."""
        self._credit -= 1
        self.room -= size
        is_recent = size <= SMALL and time.monotonic() - self._served_at < RECENT / 2
        if self._credit <= 0 or self.room < 0 or not is_recent:
            self._served_at = time.monotonic()
            self._hear()
            self.windows.drop_taken()
            self._credit, self.room = (0, -1) if self._died() else self.windows.room()

    def _send_message(self, peer: Peer, message: Message, first: int = 0) -> None:
        all(self._send(peer, piece) for piece in message.pieces[first:])  # to the first that fails

    def _send(self, peer: Peer, piece: Piece) -> bool:
        """False if its connection is gone; what is lost is sent again when it comes back."""
        if peer.connection is None or peer.route is None:
            return False
        try:
            send(self.socket, peer.route, MORE)
            piece.send(self.socket)
        except zmq.ZMQError as error:
            attending.lose_by(error, peer)
            return False
        return True

    def tell(self, peer: Peer, what: What, sequence: int = 0, body: object = None) -> None:
        """A frame that is no message."""
        frame = control(Header(what, self.epoch, sequence), body)  # type: ignore[arg-type]
        self._send(peer, Piece(frame))

    def welcome(self, peer: Peer, sequence: int, piece: int) -> None:
        """Sends everything from that frame on."""
        self._send(peer, Piece(attending.welcome(self, peer, sequence, piece)))
        for message in self.outbox.since(sequence):
            self._send_message(peer, message, piece if message.sequence == sequence else 0)
        if self.everybody_is_here:
            self.tell(peer, What.READY)
        if self._is_ending:
            self._say_end(peer)

    def is_set(self) -> bool:
        """Asked while the same call waits for the ring: raises for who died here meanwhile."""
        with self._lock:
            self._look()
        return False

    def _look(self) -> None:
        """In a call that waits: hears, judges, and raises for who died elsewhere."""
        self._served_at = time.monotonic()
        self._hear()
        attending.look(self)
        self.check()
        attending.raise_death(self)

    def _died(self) -> bool:
        return any(peer.state == "dead" for peer in self.peers)

    def _text(self, peer: Peer) -> str:
        return peer.text(self.local_ranks, self.outbox.next)

    # Waiting ----------------------------------------------------------------------------------

    def _wait(
        self,
        is_ready: Callable[[], bool],
        deadline: float | None,
        timeout: float | None,
        culprits: Callable[[], list[str]],
        words: str,
    ) -> None:
        """Until `is_ready` holds; a death ends it, too."""

        def line(waited: float) -> str:
            return (
                f"{names_of(culprits())} kept the writer (pid {os.getpid()}) waiting for "
                f"{waited:.1f} s{words}"
            )

        stall = Stall(line)
        while True:
            with self._lock:
                self._look()
                self._find_dead_here()
                if is_ready():
                    return
                left = remaining(deadline)
                if left == 0:
                    raise TimedOut(
                        f"gave up after {timeout} s waiting for {names_of(culprits())}", timeout
                    )
                stall.speak()
            self._sleep(self._call_poller, SLICE if left is None else min(left, SLICE))

    def wait_until_ready(self, timeout: float | None) -> None:
        """Returns when all remote readers have attached."""
        deadline = deadline_of(timeout)
        with self.turn:
            self._wait(
                lambda: not self.absent(),
                deadline,
                timeout,
                self.everybody_absent,
                ": not everybody has attached to the queue",
            )

    def absent(self) -> list[Peer]:
        """The remote readers that have not attached."""
        return [peer for peer in self.peers if peer.state == "absent"]

    # What readers say -------------------------------------------------------------------------

    def _hear(self) -> None:
        """Reads all that readers have said; with the lock."""
        self.mend()
        self.is_torn = True
        for _ in range(_MOST_AT_ONCE):
            try:
                route = receive(self.socket, LAST)
            except zmq.Again:
                break
            parts = self.socket.recv_multipart(copy=False)
            try:
                attending.hear(self, route, parts)
            except CorruptMessage:
                self._porter.refused += 1  # a stranger's, or a listed reader's that is broken
        self.is_torn = False

    def _answer(self, *, readers: bool = True) -> float | None:
        """Does what is due; seconds until it must be looked again."""
        self.mend()
        while can_receive(self._monitor):
            event = parse_monitor_message(self._monitor.recv_multipart())
            self._doorstep.note(event["event"], event["value"])
            if event["event"] == zmq.EVENT_DISCONNECTED:
                attending.lose_connection(self, event["value"])
        self._doorstep.clear(self.peers)
        for place in self._porter.answer_all():
            attending.note_sign_of_life(self.peers[place])
        if readers:
            self._hear()
            self.windows.drop_taken()
        return attending.look(self)

    def _serve(self) -> None:
        with self._lock:
            was_recent = time.monotonic() - self._served_at < RECENT
            pause = self._answer(readers=not was_recent)
            if not attending.announce_ready(self) and not self.absent():
                pause = SLICE  # local readers tell nobody here
            if was_recent:
                pause = RECENT if pause is None else min(pause, RECENT)
        self._sleep(self._quiet_poller if was_recent else self._full_poller, pause)

    def everybody_absent(self) -> list[str]:
        """Who has not attached, here and elsewhere; named as far as anybody would read it."""
        absent = self.absent()
        named = self.absent_here() + [self._text(peer) for peer in absent[:MOST_NAMED]]
        return named + ["another reader"] * (len(absent) - MOST_NAMED)

    # The rest ---------------------------------------------------------------------------------

    def statistics(self) -> tuple[ReaderStatistics, ...]:
        """A row for each remote reader."""
        with self._lock:
            self.check()
            self._hear()
            return tuple(peer.statistics(self.local_ranks, self.outbox.next) for peer in self.peers)

    def secrets_for(self, rank: int | None) -> list[str]:
        """The secret of that reader's place, which is its own from now on; without a rank all."""
        if rank is None:
            return list(self.keys.reader_secrets)
        with self._lock:
            return [self.keys.reader_secrets[attending.place_for(self, rank).place]]

    def release_reader(self, rank: int) -> None:
        """Goes on without a reader that is dead or absent."""
        with self.turn, self._lock:
            attending.release(self, rank)
            self.windows.drop_taken()

    def _say_goodbye(self) -> None:
        bound, news = self.options.liveness, (*self._quiet, self._readers_fd)
        lingering.answer_while(lambda peer: peer.is_lost, self.peers, self._answer, news, bound)
        self._is_ending = True
        for peer in self.peers:
            self._say_end(peer)
        lingering.answer_while(Peer.may_ask_again, self.peers, self._answer, news, bound)
        self._stop_monitor()
        self._monitor.close(0)
        self._porter.socket.close(0)
        lingering.close(
            self._context,
            self.socket,
            [peer.connection for peer in self.peers if peer.state == "running"],
            bound,
        )

    def _say_end(self, peer: Peer) -> None:
        self.tell(peer, What.END, self.outbox.next)
        peer.end_said_at = time.monotonic()

    def _free(self) -> None:
        super()._free()
        lending.end()

    def _drop_inherited(self) -> None:
        host = None if self.options.listen_on_all else self.endpoint.host
        tcp.close_inherited(host, self.endpoint.port, as_writer=True)
