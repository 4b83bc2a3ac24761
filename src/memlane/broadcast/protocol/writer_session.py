"""The writer's side of the protocol: readers attach, reconnect, get lost, leave and die.

Takes frames and the time, and puts frames to send into the peers and `answers`. No sockets, no
threads, no clock: the driver reports connections, and calls `tick` at the time that it returned.
A reader's frame is answered, or the reader repeats it, so any frame may be lost or arrive twice.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING

from memlane._base.arguments import integer
from memlane._base.naming import MOST_NAMED
from memlane.broadcast.protocol import admission, places
from memlane.broadcast.protocol.frames import (
    Absent,
    Header,
    Hello,
    Refused,
    Report,
    Welcome,
    What,
    body_of,
    control,
    header_of,
)
from memlane.broadcast.protocol.outbox import Outbox
from memlane.broadcast.protocol.peer import Peer, usual_place
from memlane.errors import CorruptMessage, InvalidArgument, ReaderDied

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memlane._base.msgspec import msgspec
    from memlane.broadcast.options import RemoteOptions

REPEAT = 0.5
"""Seconds until an unanswered END is sent again."""


class WriterSession:
    """All readers of one writer.

    Attributes:
        answers: frames for readers that have no stream, with their routes, the oldest first.
        absent_here: names the readers on this host that have not attached.
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
        place_of_token: Callable[[str], int | None] = lambda _token: None,
    ) -> None:
        self._place_of_token = place_of_token
        self.local_ranks, self.options = local_ranks, options
        self.queue_id, self.epoch, self.pid = queue_id, epoch, pid
        self._ring_sizes = ring_sizes
        self.peers = [Peer(place) for place in range(places)]
        self.outbox = Outbox(self.peers, options.window, options.window_bytes)
        self.answers: deque[tuple[bytes, bytes]] = deque()
        self.absent_here: Callable[[], list[str]] = list
        self.is_everybody_here = False
        self.ending_since: float | None = None
        self._by_route: dict[bytes, Peer] = {}

    # Frames -----------------------------------------------------------------------------------

    def receive(
        self, route: bytes, frame: bytes, now: float, place: int | None = None, address: str = ""
    ) -> str | None:
        """Handles one frame of a reader. An invalid one raises CorruptMessage and changes nothing.

        For a HELLO, `place` is the one that its sender has proven, `address` the sender's.
        Returns a line for the log if an attached reader is refused for the first time.
        """
        header = header_of(frame)
        if header.what == What.HELLO:
            return self._greet(route, body_of(frame, Hello), now, place, address)
        peer = self._by_route.get(route)
        if peer is None or header.epoch != self.epoch:
            raise CorruptMessage("a frame from a peer that has not said hello")
        if header.what == What.BYE:
            self._hear_bye(route, peer, now)
        elif peer.state != "running" and header.what != What.REPORT:  # also while it attaches
            raise CorruptMessage(f"a frame from {peer.name(self.local_ranks)} ({peer.state})")
        elif header.what == What.ACK:
            self._take(peer, header.sequence, now)
        elif header.what == What.ASK:
            if self.is_everybody_here:
                peer.say(self._frame(What.READY))
            else:
                names = self.everybody_absent(now)
                free = [other.place for other in self.absent()]
                absent = Absent(names[:MOST_NAMED], free, len(names) - len(free))
                peer.say(self._frame(What.ABSENT, body=absent))
        elif header.what == What.REPORT:
            self._hear_report(peer, body_of(frame, Report), now)
        elif header.what == What.END:
            peer.hear_end()
        else:
            raise CorruptMessage(f"a reader sent a frame of kind {header.what}")
        return None

    def _greet(
        self, route: bytes, hello: Hello, now: float, place: int | None, address: str
    ) -> str | None:
        if place is None:
            place = self._place_of_token(hello.token)
        if place is None or hello.queue_id != self.queue_id:
            raise CorruptMessage("a hello from an unexpected peer")
        peer = self.peers[place]
        if peer.session == hello.session and hello.number <= peer.greeting:
            return None  # by a connection that has ended since
        refusal = admission.refusal(self.peers, peer, hello, self.local_ranks, self.outbox)
        if refusal is not None:
            peer.knock(0.0)  # not from the reader that lost its connection
            self.answers.append((route, self._frame(What.REFUSED, body=refusal)))
            is_attached = peer.state == "running" and peer.session == hello.session
            if is_attached and peer.refuse():
                return f"{self.text(peer, now)} was refused: {refusal.text}"
            return None
        if peer.state == "absent":
            for other in self.peers:
                if other is not peer and other.rank == hello.rank:
                    other.keep_for(None)  # the reader chose another place than the one kept for it
            is_shared = self.options.relay and len(self.peers) > 1 and not peer.is_alone
            host = hello.host if is_shared else ""
            relay = places.relay_at(self.peers, host) if host else None
            peer.ask(hello, host, relay)
            self._connect(peer, route, hello, address)
            if relay is not None:
                if relay.ring is not None:
                    peer.say(self._welcome(peer))
                return None
            peer.attach(now)
        else:
            if not (hello.host or hello.is_behind):  # it has no ring to share, or none any more
                peer.share_nothing()
                self._part_orphans(now)
            self._connect(peer, route, hello, address)
            if hello.is_behind or peer.via is not None:
                has_relay = peer.via is not None
                body = None if has_relay else admission.NO_RELAY
                peer.say(self._frame(What.SEEN if has_relay else What.REFUSED, body=body))
                return None
        if not peer.host:  # its readers may not have read what a relay has taken
            self._take(peer, hello.taken, now)
        peer.stream_from((hello.sequence, hello.piece), self._welcome(peer, hello))
        if self.is_everybody_here:
            peer.say(self._frame(What.READY))
        return None

    def _connect(self, peer: Peer, route: bytes, hello: Hello, address: str) -> None:
        if peer.route is not None:
            self._by_route.pop(peer.route, None)
        self._by_route[route] = peer
        peer.connect(route, hello.pid, address, hello.number)

    def _hear_bye(self, route: bytes, peer: Peer, now: float) -> None:
        if peer.state == "running":
            peer.leave()
            self._part_orphans(now)
        elif peer.state == "absent":
            peer.forget()
        self.answers.append((route, self._frame(What.LEFT)))

    def _hear_report(self, teller: Peer, report: Report, now: float) -> None:
        """A relay's report on the readers behind it, or such a reader's on itself."""
        rows = places.rows_of(self.peers, teller, report, self.outbox.next)
        if places.is_relay(teller) and teller.ring is None:
            teller.relay_through((report.name, report.ring_id))
            for peer in places.behind(self.peers, teller):
                if peer.state == "absent":
                    peer.say(self._welcome(peer))
        for peer, row in rows:
            # Only its own key makes a place attached.
            if peer.state == "absent" and peer is teller and peer.via is not None:
                peer.attach(now)
            if peer.state != "running":
                continue
            peer.found_behind(row.pid, peer.address)
            if row.taken > peer.taken:
                self._take(peer, row.taken, now)
            if row.state == "dead":
                self._die(peer, "its process ended", now)
            elif row.state == "closed" and peer is teller:
                peer.stop_reading()
            elif row.state == "closed":
                peer.leave()
        if teller.via is not None and teller.state == "running":
            teller.say(self._frame(What.SEEN))
        elif teller.via is not None:
            teller.say(self._frame(What.REFUSED, body=admission.given_up(teller)))

    def _take(self, peer: Peer, sequence: int, now: float) -> None:
        """That reader has taken everything before `sequence`."""
        if not peer.taken <= sequence <= self.outbox.next:
            raise CorruptMessage(
                f"{peer.name(self.local_ranks)} acknowledges message {sequence}: it had taken "
                f"{peer.taken}, and {self.outbox.next} were sent"
            )
        if sequence > peer.taken and peer.is_waited_for:
            peer.take(sequence, self.outbox.end_of(sequence), now)

    def _frame(self, what: What, sequence: int = 0, body: msgspec.Struct | None = None) -> bytes:
        return control(Header(what, self.epoch, sequence), body)

    def _welcome(self, peer: Peer, hello: Hello | None = None) -> bytes:
        """The WELCOME: where the stream begins, or which ring to make or read from."""
        sequence, piece = (0, 0) if hello is None else (hello.sequence, hello.piece)
        ring = None
        if peer.host:
            ring = places.ring_of(self.peers, peer, self.local_ranks, self._ring_sizes)
        options = self.options
        body = Welcome(self.pid, options.window, options.window_bytes, peer.greeting, ring)
        return control(Header(What.WELCOME, self.epoch, sequence, piece=piece), body)

    def is_known(self, route: bytes) -> bool:
        """Is that the connection of a reader that has attached or is attaching?"""
        peer = self._by_route.get(route)
        return peer is not None and peer.is_connected

    # Connections ------------------------------------------------------------------------------

    def knock(self, place: int, now: float) -> None:
        """A connection has proven the key of that place."""
        self.peers[place].knock(now)

    def give_up(self, peer: Peer, why: str, now: float) -> None:
        """Its host does not answer. For readers behind a relay, the relay's reports decide."""
        if peer.via is None:
            peer.fall_silent()
            self._die(peer, why, now)

    def say_again(self) -> None:
        """A reader's frame may have been lost: asks each to acknowledge again."""
        for peer in self.peers:
            if peer.is_streaming:
                peer.say(self._frame(What.AGAIN))

    # Time -------------------------------------------------------------------------------------

    def tick(self, now: float) -> float | None:
        """Does what is due; returns when more is due."""
        self._part_orphans(now)  # an interruption may have skipped this
        due = None
        bound = self.options.liveness
        for peer in self.peers:
            peer.note_loss(now)
            if peer.state == "running" and peer.lost_since is not None:
                dead_at = max(peer.lost_since, peer.knocked_at) + bound
                if now >= dead_at:
                    why = f"its connection was lost and not restored within {bound} s"
                    self._die(peer, why, now)
                else:
                    due = dead_at if due is None else min(due, dead_at)
            if self.ending_since is not None and peer.is_streaming and not peer.has_heard_end:
                if now >= peer.end_due and peer.cursor == (self.outbox.next, 0):
                    peer.tell_end(self._frame(What.END, self.outbox.next), now + REPEAT)
                if peer.end_due > now:
                    due = peer.end_due if due is None else min(due, peer.end_due)
        return due

    def end(self, now: float) -> None:
        """There will be no more messages."""
        if self.ending_since is None:
            self.ending_since = now

    def unfinished(self) -> list[Peer]:
        """Readers that still have to confirm END; absent ones, too, if any message was sent."""
        return [
            peer
            for peer in self.peers
            if (peer.owes_end and not self._is_over(peer))
            or (peer.state == "absent" and self.outbox.next > 0)
        ]

    def _is_over(self, peer: Peer) -> bool:
        """Is it a relay that has closed and lost its connection, with no readers left behind it?"""
        behind = places.behind(self.peers, peer)
        is_lost = peer.has_left and not peer.is_connected
        return is_lost and all(other.state in ("closed", "dead") for other in behind)

    def missed(self) -> list[Peer]:
        """Readers that may be alive, but have not confirmed END or not taken everything."""
        owing = self.unfinished()
        return [
            peer
            for peer in self.peers
            if peer in owing
            or (peer.via in owing and peer.state != "closed")
            or (peer.is_silent and peer.taken < self.outbox.next)
        ]

    def stuck(self, now: float) -> bool:
        """Has no unfinished reader made progress for too long? A reader without a connection has
        its own bound, after which it counts as dead."""
        waiting = self.unfinished()
        if any(peer.lost_since is not None for peer in waiting):
            return False
        since = self.ending_since if self.ending_since is not None else now
        latest = max((peer.last_progress for peer in waiting), default=now)
        return now - max(since, latest) >= self.options.liveness

    # Life and death ---------------------------------------------------------------------------

    def _die(self, peer: Peer, why: str, now: float) -> None:
        word = Refused("gone", f"reader {peer.rank} is dead: {why}")
        peer.die(why, self._frame(What.REFUSED, body=word))
        self._part_orphans(now)

    def _part_orphans(self, now: float) -> None:
        """Readers behind a relay that has ended continue alone, as do those that were attaching."""
        for peer in self.peers:
            if peer.via is None or places.is_relay(peer.via):
                continue
            peer.say(self._frame(What.REFUSED, body=admission.NO_RELAY))
            if peer.state == "absent":
                peer.forget()
            else:
                peer.part(now)

    def has_dead(self) -> bool:
        return any(peer.state == "dead" for peer in self.peers)

    def raise_death(self) -> None:
        """Raises ReaderDied until the dead reader is released."""
        for peer in self.peers:
            if peer.state == "dead":
                rank = peer.usual_rank(self.local_ranks)
                raise ReaderDied(
                    rank,
                    peer.pid,
                    f" at {peer.address} after {peer.taken} messages: {peer.died}; "
                    f"call release_reader({rank}) to continue without it",
                )

    def release(self, rank: int) -> None:
        """Stops waiting for that reader; no other reader can take its place."""
        number = integer("rank", rank)
        usual = usual_place(number, self.local_ranks)
        found = [peer for peer in self.peers if peer.rank == number] or [
            peer for peer in self.peers if peer.rank is None and peer.place == usual
        ]
        if not found or number in self.local_ranks:
            raise InvalidArgument(f"the queue has no reader {rank} on another host")
        peer = found[0]
        if peer.state == "running":
            raise InvalidArgument(
                f"reader {rank} is connected from {peer.address} (pid {peer.pid}): only a dead or "
                f"absent reader can be released; end its process first"
            )
        peer.keep_for(number)
        peer.leave()
        self.outbox.drop_taken()

    # Places -----------------------------------------------------------------------------------

    def absent(self) -> list[Peer]:
        """The remote readers that have not attached."""
        return [peer for peer in self.peers if peer.state == "absent"]

    def everybody_absent(self, now: float) -> list[str]:
        """The absent readers, here and elsewhere; only the first few by name."""
        absent = self.absent()
        named = [self.text(peer, now) for peer in islice(absent, MOST_NAMED)]
        return self.absent_here() + named + ["another reader"] * (len(absent) - MOST_NAMED)

    def announce_ready(self) -> None:
        """Tells the readers once everybody has attached, here and elsewhere."""
        if not (self.is_everybody_here or self.absent() or self.absent_here()):
            self.is_everybody_here = True
            for peer in self.peers:
                peer.say(self._frame(What.READY))

    def place_for(self, rank: int) -> Peer:
        """The place that is kept for that rank from now on."""
        for peer in self.peers:
            if peer.rank == rank:
                return peer
        free = [peer for peer in self.peers if peer.rank is None and peer.state == "absent"]
        usual = usual_place(rank, self.local_ranks)
        if not free:
            ranks = [peer.rank for peer in self.peers]
            raise InvalidArgument(
                f"the queue has no reader {rank}: the {len(ranks)} places for remote readers "
                f"belong to {ranks}"
            )
        found = next((peer for peer in free if peer.place == usual), free[-1])
        found.keep_for(rank)
        return found

    def text(self, peer: Peer, now: float) -> str:
        return peer.text(self.local_ranks, self.outbox.next, now)

    def texts(self, peers: Iterable[Peer], now: float) -> list[str]:
        return [self.text(peer, now) for peer in peers]
