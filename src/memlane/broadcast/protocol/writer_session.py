"""The writer's side of the protocol: readers attach, reconnect, get lost, leave and die.

Takes frames, events and the time; `frames_due` has what to send. No sockets, no threads, no clock:
the driver reports connections, and calls `tick` at the time that it returned. Nobody else touches
peers and their outbox. A reader's frame is answered, or the reader repeats it, so any frame may be
lost or arrive twice.

A reader that holds a valid key may still lie. So whatever it says is checked against what was sent,
it can harm only itself and, as a relay, the readers behind it, and what one connection can cost is
bounded: `replies.unwanted` lists those that cost more. An honest reader that loses one reconnects.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from memlane.broadcast.protocol import admission
from memlane.broadcast.protocol.descriptions import text_of
from memlane.broadcast.protocol.ending import Ending
from memlane.broadcast.protocol.frames import (
    Header,
    Hello,
    OtherVersion,
    Refused,
    Report,
    What,
    parsed,
)
from memlane.broadcast.protocol.outbox import Outbox, Piece
from memlane.broadcast.protocol.places import Places
from memlane.broadcast.protocol.readiness import Readiness
from memlane.broadcast.protocol.replies import Replies
from memlane.broadcast.protocol.states import Event, Life, Link
from memlane.errors import CorruptMessage, InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memlane.broadcast.options import RemoteOptions
    from memlane.broadcast.protocol.peer import Cursor, Peer

    Due = tuple[bytes, Piece, Peer | None, Cursor | None]
    """A route and the frame to send on it; `sent` gets the peer and the cursor back."""

_OVERHEAD = 1 << 20  # bytes of headers and control frames in what a host receives


class WriterSession:
    """All readers of one writer.

    Attributes:
        replies: the control frames, and the connections to shut down.
        readiness: whether everybody has attached.
    """

    def __init__(
        self,
        places: int,
        local_ranks: list[int],
        options: RemoteOptions,
        queue_id: str,
        epoch: int,
        pid: int,
        ring_sizes: tuple[int, int],
        ticket_of_token: Callable[[str], int | None] = lambda _token: None,
    ) -> None:
        self._ticket_of_token = ticket_of_token
        self._options = options
        self._queue_id, self.epoch = queue_id, epoch
        self.places = Places(places, local_ranks, late=options.late_readers)
        self._peers = self.places.peers
        self.replies = Replies(self.places, options, epoch, pid, ring_sizes)
        self.outbox = Outbox(self._peers, options.window, options.window_bytes)
        self._has_taken = False  # some reader has, since messages were last dropped
        self._has_met_others = False  # of another version, for whom nobody waits
        self.readiness = Readiness(self.places, self.outbox, self.replies)
        self.ending = Ending(
            self.places, self.outbox, options.liveness, partial(self.replies.frame, What.END)
        )

    # Sending ----------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Returns whether a message of `size` bytes may be sent; not while a dead reader awaits
        release."""
        return self.outbox.has_room(size) and not self.has_dead()

    def room(self) -> tuple[int, int]:
        """Returns how many messages, and bytes in total, may be sent; negative bytes: none."""
        return (0, -1) if self.has_dead() else self.outbox.room()

    def publish_alone(self, piece: Piece, size: int) -> Iterable[Due]:
        """Appends a message in one piece that no ring gets first, and returns `frames_due`; less is
        done if every stream has had everything before it."""
        here, after = (self.outbox.next, 0), (self.outbox.next + 1, 0)
        due: list[Due] = []
        self.outbox.append(piece, size)
        for peer in self._peers:
            if peer.link is Link.STREAMING:
                if peer.cursor != here or peer.said or peer.route is None:
                    return self.frames_due()
                due.append((peer.route, piece, peer, after))
        return due

    def frames_due(self) -> Iterator[Due]:
        """Yields what is due until it is `sent`; one whose sending was interrupted comes again."""
        if self._has_taken:
            self._has_taken = False
            self.outbox.drop_taken()
        for route, frame in self.replies.due():
            yield route, (frame,), None, None
        for peer in self._peers:
            while peer.is_connected and (found := self.outbox.frame_for(peer)) is not None:
                piece, cursor = found
                yield peer.route or b"", piece, peer, cursor

    def sent(self, peer: Peer | None, cursor: Cursor | None) -> None:
        """Notes that the frame was handed over, or that the connection of an answer is gone."""
        if peer is None:
            self.replies.sent()
        else:
            peer.sent(cursor)

    # Frames -----------------------------------------------------------------------------------

    def heard(
        self, route: bytes, frame: bytes, now: float, ticket: int | None = None, address: str = ""
    ) -> str | None:
        """Handles one frame of a reader. An invalid one raises CorruptMessage and changes nothing.

        `ticket` is that of the key that the sender has proven, if it has; `address`, the sender's,
        is needed for a HELLO. Returns a line for the log if an attached reader is refused for the
        first time.
        """
        peer = self.places.at(route)
        was_idle, line = True, None
        try:
            try:
                header, body = parsed(frame)
            except OtherVersion as error:
                return self._refuse_version(route, error, ticket, address)
            if header.what == What.HELLO:
                if ticket is None:
                    ticket = self._ticket_of_token(body.token)
                was_idle, line = self._greet(route, body, now, ticket, address)
            elif (
                peer is None
                or header.epoch != self.epoch
                or ticket not in (None, self._ticket_of(peer))
            ):
                raise CorruptMessage("a frame from a peer that has not said hello")
            else:
                was_idle = self._hear(route, peer, header, body, now)
        finally:
            if was_idle and peer is not None and peer.note_idle_frame():
                self.replies.reject(route)
        return line

    def _refuse_version(
        self, route: bytes, error: OtherVersion, ticket: int | None, address: str
    ) -> str | None:
        """Answers a peer of another version, which knows this one by the answer's first bytes. If
        it has proven the key of a reader that is waited for, calls raise LayoutMismatch from now
        on. Otherwise returns a line for the log, once."""
        if self.is_known(route) or (ticket is None and not error.is_memlane):
            raise error
        line = error.text(f"a reader at {address}")
        self.replies.answer(route, self.replies.refused(Refused("version", line)))
        if ticket is not None:
            peer = self._peers[ticket % len(self._peers)]
            if ticket == self._ticket_of(peer) and peer.is_missing:
                peer.refuse_version(error.text(f"{peer.name} at {address}"))
                return None
        is_first, self._has_met_others = not self._has_met_others, True
        return line if is_first else None

    def _ticket_of(self, peer: Peer) -> int:
        """Returns the ticket that the key of its place and generation proves."""
        return peer.generation * len(self._peers) + peer.place

    def is_known(self, route: bytes) -> bool:
        """Returns whether that is the connection of a reader that has attached or is attaching."""
        peer = self.places.at(route)
        return peer is not None and peer.is_connected

    def _hear(self, route: bytes, peer: Peer, header: Header, body: Any, now: float) -> bool:
        """Handles a frame of a known reader; returns whether it was no progress."""
        if header.what == What.BYE:
            self._hear_bye(route, peer, now)
        elif not peer.is_here and header.what != What.REPORT:  # also while it attaches
            raise CorruptMessage(f"a frame from {peer.name} ({peer.state})")
        elif header.what == What.ACK:
            return not self._take(peer, header.sequence, now)
        elif header.what == What.ASK:
            self.readiness.ask(peer)
        elif header.what == What.REPORT:
            return not self._hear_report(peer, body, now)
        elif header.what == What.END:
            if header.sequence != self.outbox.next or not self.ending.has_begun:
                raise CorruptMessage(f"{peer.name} confirms an end that it was not told")
            peer.hear_end()
        else:
            raise CorruptMessage(f"a reader sent a frame of kind {header.what}")
        return True

    def _greet(
        self, route: bytes, hello: Hello, now: float, ticket: int | None, address: str
    ) -> tuple[bool, str | None]:
        """Handles HELLO; returns whether it was no progress, and a line for the log."""
        if ticket is None or hello.queue_id != self._queue_id:
            raise CorruptMessage("a hello from an unexpected peer")
        peer = self._peers[ticket % len(self._peers)]
        if ticket != self._ticket_of(peer):
            refused = self.replies.refused(admission.replaced(hello))
            self.replies.answer(route, refused)
            return True, None
        if peer.has_heard(hello):
            return True, None
        refusal = admission.refusal(self.places, peer, hello, self.outbox)
        if refusal is not None:
            peer.authenticate(0.0)  # not from the reader that lost its connection
            self.replies.answer(route, self.replies.refused(refusal))
            if peer.is_here and peer.session == hello.session and peer.refuse():
                return True, f"{text_of(peer, self.outbox.next, now)} was refused: {refusal.text}"
            return True, None
        is_known = route == peer.route
        taken, cursor = peer.wants(hello)
        if peer.is_absent:
            if peer.comes_late:
                peer.begin_at(self.outbox.next, self.outbox.bytes)
                taken, cursor = peer.wants(hello)
            self.places.give_up(hello.rank, peer)
            is_unshared = peer.is_unshared or peer.comes_late
            is_shared = self._options.relay and len(self._peers) > 1 and not is_unshared
            host = hello.host if is_shared else ""
            relay = self.places.relay_at(host) if host else None
            peer.ask(hello, host, relay)
            self._connect(peer, route, hello, address, now)
            if relay is not None:
                peer.apply(Event.SENT_TO_RELAY, now)
                if relay.ring is not None:
                    peer.say(self.replies.welcome(peer))
                return is_known, None
            peer.attach(Event.ATTACHED, now)
        else:
            if not (hello.host or hello.is_behind):  # it has no ring to share, or none any more
                peer.stop_sharing()
                self._part_readers(now)
            is_behind = peer.is_behind(hello)
            if not (is_behind or self._may_resend(peer, route, cursor)):
                return True, None
            self._connect(peer, route, hello, address, now)
            if is_behind:
                peer.say(self.replies.seen(peer))
                return is_known, None
        if not peer.host:  # its readers may not have read what a relay has taken
            self._take(peer, taken, now)
        peer.begin_stream(cursor, self.replies.welcome(peer, cursor), now)
        if self.readiness.is_everybody_here:
            peer.say(self.replies.frame(What.READY))
        return is_known, None

    def _may_resend(self, peer: Peer, route: bytes, begin: Cursor) -> bool:
        """Returns whether this connection may carry again what that HELLO asks for, whatever became
        of its stream. A window at most: what it has not read by then is freed with the connection,
        and sent on the next one."""
        if route != peer.route:
            return True
        peer.resend(self.outbox.bytes_between(begin, peer.cursor))
        if peer.resent_bytes <= self._options.window_bytes:
            return True
        self.replies.reject(route)
        return False

    def _connect(self, peer: Peer, route: bytes, hello: Hello, address: str, now: float) -> None:
        holder = self.places.at(route)
        if holder is not None and holder is not peer:  # it has two keys
            holder.lose(now)
        former = self.places.move(peer, route)
        if former is not None:
            self.replies.reject(former)
        peer.connect(route, hello.pid, address, hello.number, now)

    def _hear_bye(self, route: bytes, peer: Peer, now: float) -> None:
        was_absent = peer.is_absent
        peer.apply(Event.LEFT, now)
        if was_absent:
            peer.forget()
        else:
            self._part_readers(now)
        self.replies.answer(route, self.replies.frame(What.LEFT, peer.greeting))

    def _hear_report(self, teller: Peer, report: Report, now: float) -> bool:
        """A relay's report on the readers behind it, or such a reader's on itself; returns whether
        it was progress."""
        rows = self.places.rows_of(teller, report, self.outbox.next)
        has_changed = False
        if teller.is_relay:
            teller.report(now)
            if teller.ring is None:
                has_changed = True
                teller.relay_through((report.name, report.ring_id))
                for peer in self.places.behind(teller):
                    if peer.is_absent:
                        peer.say(self.replies.welcome(peer))
        for peer, row in rows:
            # Only its own key makes a place attached.
            if peer.is_absent and peer is teller and peer.via is not None:
                peer.attach(Event.SEEN_BEHIND, now)
                has_changed = True
            if not peer.is_here:
                continue
            peer.found_behind(row.pid, peer.address)
            if peer.life is Life.RUNNING and row.taken > peer.taken:
                self._take(peer, row.taken, now)
                has_changed = True
            if row.state == "dead":
                self._die(peer, Event.REPORTED_DEAD, "its process ended", now)
            elif row.state == "closed":
                is_own = peer is teller
                peer.apply(Event.STOPPED_READING if is_own else Event.REPORTED_CLOSED, now)
        if teller.via is not None and teller.is_here:
            teller.say(self.replies.seen(teller))
        elif teller.via is not None and teller.is_absent and teller.route is not None:
            # Its HELLO was interrupted: it greets again when it is back.
            self.replies.reject(teller.route)
        elif teller.via is not None:
            teller.say(self.replies.refused(admission.declared_dead(teller)))
        return has_changed

    def _take(self, peer: Peer, sequence: int, now: float) -> bool:
        """Notes that the reader has taken everything before `sequence`; returns whether that
        is new."""
        if not peer.taken <= sequence <= self.outbox.next:
            raise CorruptMessage(
                f"{peer.name} acknowledges message {sequence}: it had taken {peer.taken}, and "
                f"{self.outbox.next} were sent"
            )
        if sequence == peer.taken or not peer.is_waited_for:
            return False
        peer.take(sequence, self.outbox.end_of(sequence), now)
        self._has_taken = True
        return True

    # Connections ------------------------------------------------------------------------------

    def authenticated(self, ticket: int, now: float) -> None:
        """A connection has proven the key of that ticket."""
        peer = self._peers[ticket % len(self._peers)]
        if ticket == self._ticket_of(peer):
            peer.authenticate(now)

    def lost(self, route: bytes, now: float) -> None:
        """Notes the loss of a connection."""
        peer = self.places.at(route)
        if peer is not None:
            peer.lose(now)
            self.places.forget_former(peer)

    def unsent(self, peer: Peer, now: float) -> None:
        """A frame that was due could not be sent, because its connection is gone."""
        peer.lose(now)

    def silent(self, route: bytes, why: str, now: float) -> None:
        """Notes that a peer's host does not answer. For readers behind a relay, the relay's reports
        decide."""
        peer = self.places.at(route)
        if peer is None:
            return
        if peer.is_absent:
            self.replies.reject(route)  # it attaches anew if it lives
        elif peer.via is None:
            peer.fall_silent()
            self._die(peer, Event.TIMED_OUT, why, now)
            # Its descriptor and frames would stay until the kernel gives up.
            self.replies.reject(route)

    def moved(self, route: bytes, nbytes: int, now: float) -> None:
        """Notes the bytes that a peer's host has received. Not progress for ever: a reader that
        only reconnects is sent the same again and again."""
        peer = self.places.at(route)
        if peer is None:
            return
        owed = self.outbox.bytes - peer.taken_bytes
        if peer.note_moved(nbytes) <= 2 * owed + _OVERHEAD:
            peer.note_progress(now)

    def drained(self, route: bytes) -> None:
        """Notes that a peer's host has received everything that was sent to it."""
        peer = self.places.at(route)
        if peer is not None:
            peer.note_drained()

    def say_again(self) -> None:
        """A reader's frame may have been lost: asks each to acknowledge again."""
        for peer in self._peers:
            if peer.link is Link.STREAMING:
                peer.say(self.replies.frame(What.AGAIN))

    # Time -------------------------------------------------------------------------------------

    def delay_clocks(self, seconds: float, now: float) -> None:
        """Leaves out so many seconds in which no reader could connect, for reasons of this host."""
        for peer in self._peers:
            peer.delay_clock(seconds, now)
        self.ending.delay(now)

    def tick(self, now: float) -> float | None:
        """Does what is due; returns when more is due."""
        bound = self._options.liveness
        for relay in self.places.silent_relays(now - bound):
            relay.stop_relaying()
        self._part_readers(now)  # an interruption may have skipped this
        self.outbox.drop_taken()
        dues = []
        for peer in self._peers:
            if peer.lost_since is not None:
                dead_at = max(peer.lost_since, peer.authenticated_at) + bound
                if now < dead_at:
                    dues.append(dead_at)
                elif peer.is_absent:
                    peer.apply(Event.TIMED_OUT, now)
                    peer.forget()
                else:
                    why = f"its connection was lost and not restored within {bound} s"
                    self._die(peer, Event.TIMED_OUT, why, now)
            elif peer.is_relay and any(self.places.behind(peer)):
                dues.append(peer.reported_at + bound)
            if (again := self.ending.tell(peer, now)) is not None:
                dues.append(again)
        return min(dues, default=None)

    # Life and death ---------------------------------------------------------------------------

    def _die(self, peer: Peer, event: Event, why: str, now: float) -> None:
        word = Refused("gone", f"reader {peer.rank} is dead: {why}")
        peer.die(event, why, self.replies.refused(word), now)
        self._part_readers(now)

    def _part_readers(self, now: float) -> None:
        """Readers behind a relay that has ended go on alone, as do those that were attaching."""
        for peer in self.places.parted():
            peer.say(self.replies.refused(admission.NO_RELAY))
            peer.part(now)

    def has_dead(self) -> bool:
        return any(self.places.failed())

    def release(self, rank: int, now: float) -> None:
        """Stops waiting for that reader."""
        self.places.release(rank, now)
        self.outbox.drop_taken()

    def readmit(self, rank: int, now: float, renew: Callable[[int], None]) -> None:
        """Another process may take the place of that reader, from the next message on. First calls
        `renew` with the ticket of its key; until that returns, nothing changes."""
        self._reopen(self.places.ended(rank), rank, now, renew)

    def _reopen(self, old: Peer, rank: int, now: float, renew: Callable[[int], None]) -> None:
        new = old.successor(rank, self.outbox.next, self.outbox.bytes, now)
        renew(self._ticket_of(new))
        self.places.readmit(old, new)

    # Places -----------------------------------------------------------------------------------

    def count_absent(self) -> int:
        """The remote readers that have not attached."""
        return len(self.places.absent())

    def keep_place(
        self, rank: int, now: float, renew: Callable[[int], None], *, is_unshared: bool = False
    ) -> int:
        """The place that is kept for that rank from now on; `is_unshared`: nobody else is
        expected on its host. The last resort is a place whose reader was released before it
        attached, if no message is gone; `renew` is called as by `readmit`."""
        if not self.places.is_remote(rank):
            raise InvalidArgument(f"the queue has no reader {rank} on another host")
        spare = self.places.spare_for(rank)
        if spare is not None and spare.first == self.outbox.next:
            self._reopen(spare, rank, now, renew)
            return spare.place
        peer = self.places.kept_for(rank)
        peer.keep_for(rank, is_unshared=is_unshared)
        return peer.place
