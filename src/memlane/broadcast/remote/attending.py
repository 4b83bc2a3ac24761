"""Who attaches, comes back, is lost and dies: the writer's judgement of its remote readers.

Everything in here runs with the writer's lock held.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import zmq

from memlane._checks import integer
from memlane.broadcast.remote.peer import usual_place
from memlane.broadcast.remote.tcp import Connection
from memlane.broadcast.remote.wire import (
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
from memlane.errors import CorruptMessage, InvalidArgument

if TYPE_CHECKING:
    from memlane.broadcast.remote.peer import Peer
    from memlane.broadcast.remote.writer import RemoteWriter

# Connections are looked at so many times within the bound.
_LOOKS = 6
_LONGEST_PAUSE = 0.5


def hear(writer: RemoteWriter, route: bytes, parts: list[zmq.Frame]) -> None:
    """One frame of a reader; CorruptMessage, and nothing changed, if it is not one."""
    if len(parts) != 1:
        raise CorruptMessage(f"a reader's frame has {len(parts)} parts")
    part = parts[0].bytes
    header = header_of(part)
    if header.what == What.HELLO:
        _greet(writer, route, parts[0], body_of(part, Hello))
        return
    peer = next((peer for peer in writer.peers if peer.route == route), None)
    if peer is None or header.epoch != writer.epoch:
        raise CorruptMessage("a frame of somebody who has not said who it is")
    if peer.state != "running":
        raise CorruptMessage(f"a frame of {peer.name(writer.local_ranks)}, which is {peer.state}")
    if header.what == What.ACK:
        take(writer, peer, header.sequence)
    elif header.what == What.ASK:
        writer.tell(peer, What.ABSENT, body=Absent(writer.everybody_absent()))
    elif header.what == What.REPORT:
        _note_report(writer, peer, body_of(part, Report))
    elif header.what == What.BYE:
        peer.state = "closed"
        peer.connection = peer.lost_since = None
        _note_end_of_relay(writer, peer)
    else:
        raise CorruptMessage(f"a reader sent a frame of kind {header.what}")


def take(writer: RemoteWriter, peer: Peer, sequence: int) -> None:
    """That reader has taken everything before `sequence`."""
    if not peer.taken <= sequence <= writer.outbox.next:
        raise CorruptMessage(
            f"{peer.name(writer.local_ranks)} acknowledges message {sequence}: it had taken "
            f"{peer.taken}, and {writer.outbox.next} were sent"
        )
    if sequence > peer.taken and peer.is_waited_for:
        peer.taken_bytes = writer.outbox.end_of(sequence)
        peer.taken = sequence
        peer.last_progress = time.monotonic()


def _note_report(writer: RemoteWriter, relay: Peer, report: Report) -> None:
    """What a relay says of the readers behind it: of those only that are said to be there."""
    told = []
    for row in report.rows:
        known = [p for p in writer.peers if p.rank == row.rank and relay in (p, p.via)]
        if not known or row.taken > writer.outbox.next:
            raise CorruptMessage(f"{relay.name(writer.local_ranks)} reports of reader {row.rank}")
        told.append((known[0], row))
    for peer, row in told:
        if peer.state == "absent" and row.state != "absent":
            peer.state, peer.session = "running", relay.session
            peer.last_progress = time.monotonic()
            writer.note_attendance()
        if peer.state != "running":
            continue
        peer.pid, peer.address = row.pid, relay.address
        if row.taken > peer.taken:
            take(writer, peer, row.taken)
        if row.state == "dead":
            _die(writer, peer, "its process ended")
        elif row.state == "closed" and peer is relay:
            peer.has_left = True
        elif row.state == "closed":
            peer.state = "closed"


def _note_end_of_relay(writer: RemoteWriter, relay: Peer) -> None:
    for peer in writer.peers:
        if peer.via is relay and peer.state == "running":
            how = relay.died or "it has closed"
            _die(writer, peer, f"{relay.name(writer.local_ranks)} no longer relays to it: {how}")


def _greet(writer: RemoteWriter, route: bytes, frame: zmq.Frame, hello: Hello) -> None:
    place = _proven_place(writer, frame, hello)
    if place is None or hello.queue_id != writer.queue_id:
        raise CorruptMessage("a hello of somebody who is not expected")
    peer = writer.peers[place]
    refusal = _refusal(writer, peer, hello)
    if refusal is not None:
        peer.knocked_at = 0.0  # it was not the reader that was lost
        frame_out = control(Header(What.REFUSED, writer.epoch), refusal)
        try:
            writer.socket.send_multipart([route, frame_out], zmq.DONTWAIT)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
        return
    now = time.monotonic()
    if peer.state == "absent":
        for other in writer.peers:
            if other is not peer and other.rank == hello.rank:
                other.rank = None  # the reader chose another place than the one kept for it
        peer.rank, peer.session, peer.state = hello.rank, hello.session, "running"
        peer.last_progress = now
        writer.note_attendance()
    peer.pid = hello.pid
    peer.route = route
    peer.lost_since = None
    take(writer, peer, hello.taken)
    try:
        peer.connection = Connection(frame.get(zmq.SRCFD))
        peer.address = peer.connection.peer
    except OSError:  # gone again already
        lose(peer)
        return
    writer.welcome(peer, hello.sequence, hello.piece)


def _proven_place(writer: RemoteWriter, frame: zmq.Frame, hello: Hello) -> int | None:
    if writer.keys.insecure:
        return writer.keys.place_of_token(hello.token)
    return int(frame.get("User-Id"))  # as the list of places said


def _refusal(writer: RemoteWriter, peer: Peer, hello: Hello) -> Refused | None:
    rank = hello.rank
    if not 0 <= rank < 1 << 63 or rank in writer.local_ranks:
        return Refused("foreign", f"the queue has no remote reader {rank}")
    if peer.state == "dead":
        return _gone(peer)
    if peer.session == hello.session:
        if peer.state != "running":
            return Refused("gone", f"reader {rank} is {peer.state}")
        if not (
            peer.taken <= hello.taken <= hello.sequence <= writer.outbox.next
            and hello.sequence >= writer.outbox.first
        ):
            return Refused("gone", f"reader {rank} comes back at message {hello.sequence}")
        return None
    for other in writer.peers:
        if other.rank == rank and other.session:
            return Refused(
                "rank_taken",
                f"reader {rank} cannot attach: its place was taken by pid {other.pid} at "
                f"{other.address}, which is {other.state}",
            )
    if peer.state != "absent" or peer.rank not in (None, rank):
        return Refused("place_taken", f"that place is reader {peer.rank}'s")
    if (hello.taken, hello.sequence, hello.piece) != (0, 0, 0):
        return Refused("foreign", "a reader begins with the first message")
    return None


def _gone(peer: Peer) -> Refused:
    return Refused("gone", f"reader {peer.rank} counts as dead: {peer.died}")


def place_for(writer: RemoteWriter, rank: int) -> Peer:
    """The place that is kept for that rank from now on."""
    for peer in writer.peers:
        if peer.rank == rank:
            return peer
    free = [peer for peer in writer.peers if peer.rank is None and peer.state == "absent"]
    usual = usual_place(rank, writer.local_ranks)
    for peer in free:
        if peer.place == usual:
            peer.rank = rank
            return peer
    if not free:
        ranks = [peer.rank for peer in writer.peers]
        raise InvalidArgument(
            f"the queue has no reader {rank}: the {len(ranks)} places for remote readers are "
            f"those of {ranks}"
        )
    free[-1].rank = rank
    return free[-1]


def relay_through(writer: RemoteWriter, rank: int, ranks: list[int]) -> None:
    """Keeps the places of `ranks`, which reader `rank`, one of them, will speak for."""
    relay = place_for(writer, rank)
    for other in ranks:
        if other != rank:
            place_for(writer, other).via = relay


def welcome(writer: RemoteWriter, sequence: int, piece: int) -> bytes:
    """What a reader hears first."""
    header = Header(What.WELCOME, writer.epoch, sequence, piece=piece)
    body = Welcome(os.getpid(), writer.options.window, writer.options.window_bytes)
    return control(header, body)


# Connections -------------------------------------------------------------------------------------


def lose(peer: Peer) -> None:
    """Its connection is gone; it may come back. What it said before is still to be heard."""
    peer.connection = None
    if peer.state == "running" and peer.lost_since is None:
        peer.lost_since = time.monotonic()


def lose_connection(writer: RemoteWriter, descriptor: int) -> None:
    """libzmq has closed that descriptor, whose number may be another connection's by now."""
    for peer in writer.peers:
        connection = peer.connection
        if connection and connection.descriptor == descriptor and not connection.is_open:
            lose(peer)


def note_sign_of_life(peer: Peer) -> None:
    """Somebody has proven its key again; the hello follows when its interpreter comes to it."""
    peer.knocked_at = time.monotonic()


def look(writer: RemoteWriter) -> float | None:
    """Judges every connection; seconds until the next look, None if there is nothing to see."""
    bound = writer.options.liveness
    attached = [peer for peer in writer.peers if peer.state == "running"]
    for peer in attached:
        connection = peer.connection
        if connection is not None and not connection.is_open:
            lose(peer)
        elif connection is not None and connection.is_silent(bound):
            _die(writer, peer, f"its host has not answered for {bound} s")
        if peer.state != "running" or peer.lost_since is None:
            continue
        if time.monotonic() - max(peer.lost_since, peer.knocked_at) >= bound:
            _die(writer, peer, f"its connection ended, and it has not come back within {bound} s")
    return min(bound / _LOOKS, _LONGEST_PAUSE) if attached else None


def _die(writer: RemoteWriter, peer: Peer, why: str) -> None:
    writer.room = -1
    peer.state = "dead"
    peer.died = why
    # If it lives, and is reached again by the same connection, it would wait for ever.
    writer.tell(peer, What.REFUSED, body=_gone(peer))
    peer.connection = None
    _note_end_of_relay(writer, peer)


def release(writer: RemoteWriter, rank: int) -> None:
    """Nobody waits for that reader any more, and nobody can take its place."""
    number = integer("rank", rank)
    usual = usual_place(number, writer.local_ranks)
    found = [peer for peer in writer.peers if peer.rank == number] or [
        peer for peer in writer.peers if peer.rank is None and peer.place == usual
    ]
    if not found or number in writer.local_ranks:
        raise InvalidArgument(f"the queue has no reader {rank} on another host")
    peer = found[0]
    if peer.state == "running":
        raise InvalidArgument(
            f"reader {rank} is connected from {peer.address} (pid {peer.pid}): only a dead or "
            f"absent reader can be released; end its process first"
        )
    peer.rank = number
    peer.state = "closed"
    writer.note_attendance()
