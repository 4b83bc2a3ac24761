"""Who attaches, comes back, is lost and dies: the writer's judgement of its remote readers.

Everything in here runs with the writer's lock held.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import zmq

from memlane._checks import integer
from memlane._failures import MOST_NAMED
from memlane.broadcast.remote import hosts
from memlane.broadcast.remote.peer import usual_place
from memlane.broadcast.remote.sockets import LAST, receive, send
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
from memlane.errors import CorruptMessage, InvalidArgument, ReaderDied

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
    if peer.state != "running" and header.what != What.REPORT:  # which is for who attaches, too
        raise CorruptMessage(f"a frame of {peer.name(writer.local_ranks)}, which is {peer.state}")
    if header.what == What.ACK:
        hosts.take(writer, peer, header.sequence)
    elif header.what == What.ASK:
        names = writer.everybody_absent()
        free = [other.place for other in writer.absent()]
        absent = Absent(names[:MOST_NAMED], free, len(names) - len(free))
        writer.tell(peer, What.ABSENT, body=absent)
    elif header.what == What.REPORT:
        hosts.note_report(writer, peer, body_of(part, Report))
    elif header.what == What.BYE:
        peer.state = "closed"
        peer.connection = peer.lost_since = None
        hosts.note_end_of_relay(writer, peer)
    elif header.what == What.END:
        peer.has_heard_end = True
    else:
        raise CorruptMessage(f"a reader sent a frame of kind {header.what}")


def _greet(writer: RemoteWriter, route: bytes, frame: zmq.Frame, hello: Hello) -> None:
    place = _proven_place(writer, frame, hello)
    if place is None or hello.queue_id != writer.queue_id:
        raise CorruptMessage("a hello of somebody who is not expected")
    peer = writer.peers[place]
    refusal = _refusal(writer, peer, hello)
    if refusal is not None:
        peer.knocked_at = 0.0  # it was not the reader that was lost
        hosts.answer(writer, route, What.REFUSED, refusal)
        return
    peer.pid = hello.pid
    peer.route = route
    if peer.via is not None and peer.state == "running":
        hosts.answer(writer, route, What.SEEN)  # once more: its connection was lost
        return
    if peer.state == "absent":
        for other in writer.peers:
            if other is not peer and other.rank == hello.rank:
                other.rank = None  # the reader chose another place than the one kept for it
        peer.rank, peer.session, peer.via = hello.rank, hello.session, None
        is_shared = writer.options.relay and len(writer.peers) > 1 and not peer.is_alone
        peer.host = hello.host if is_shared else ""
        if peer.host and hosts.lead(writer, peer):
            return
        peer.state = "running"
        peer.last_progress = time.monotonic()
        writer.note_attendance()
    elif peer.host and not hello.host:
        peer.host = ""  # it could not make a ring
        hosts.note_end_of_relay(writer, peer)
    peer.lost_since = None
    if not peer.host:  # a relay takes what its readers may not have read
        hosts.take(writer, peer, hello.taken)
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
        return hosts.gone(peer)
    if peer.session == hello.session and peer.state != "absent":
        if peer.state != "running":
            return Refused("gone", f"reader {rank} is {peer.state}")
        if not (
            peer.taken <= hello.taken <= hello.sequence <= writer.outbox.next
            and hello.sequence >= writer.outbox.first
        ):
            return Refused("gone", f"reader {rank} comes back at message {hello.sequence}")
        return None
    for other in writer.peers:
        if other.rank == rank and other.session and not _may_replace(peer, other, hello):
            state = "attaching" if other.state == "absent" else other.state
            return Refused(
                "rank_taken",
                f"reader {rank} cannot attach: its place was taken by pid {other.pid} at "
                f"{other.address}, which is {state}",
            )
    if peer.state != "absent" or peer.rank not in (None, rank):
        return Refused("place_taken", f"that place is reader {peer.rank}'s")
    if (hello.taken, hello.sequence, hello.piece) != (0, 0, 0):
        return Refused("foreign", "a reader begins with the first message")
    return None


def _may_replace(peer: Peer, other: Peer, hello: Hello) -> bool:
    """Who was shown a ring may be gone: its place there tells, to who comes from the same host."""
    if other is not peer or peer.state != "absent":
        return False
    return peer.session == hello.session or peer.host == hello.host


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


def welcome(writer: RemoteWriter, peer: Peer, sequence: int, piece: int) -> bytes:
    """What a reader hears first."""
    header = Header(What.WELCOME, writer.epoch, sequence, piece=piece)
    ring = hosts.ring_of(writer, peer) if peer.host else None
    body = Welcome(os.getpid(), writer.options.window, writer.options.window_bytes, ring)
    return control(header, body)


def begin_all_again(writer: RemoteWriter) -> None:
    """What is half sent is given up, which an empty part tells; then all comes once more that
    anybody may want."""
    while writer.socket.get(zmq.RCVMORE):  # half heard
        receive(writer.socket, LAST)
    send(writer.socket, b"", LAST)  # nothing, if nothing was half sent
    for peer in writer.peers:
        if peer.connection is not None:
            writer.welcome(peer, max(peer.taken, writer.outbox.first), 0)


def raise_death(writer: RemoteWriter) -> None:
    """ReaderDied until `release_reader`; of a relay before those who are cut off by that."""
    for peer in sorted(writer.peers, key=lambda peer: peer.via is not None):
        if peer.state == "dead":
            raise ReaderDied(
                peer.rank if peer.rank is not None else -1,
                peer.pid,
                f" at {peer.address} after {peer.taken} messages: {peer.died}; "
                f"release_reader({peer.rank}) goes on without it",
            )


# Connections -------------------------------------------------------------------------------------


def lose(peer: Peer) -> None:
    """Its connection is gone; it may come back. What it said before is still to be heard."""
    peer.connection = None
    if peer.state == "running" and peer.lost_since is None:
        peer.lost_since = time.monotonic()


def lose_by(error: zmq.ZMQError, peer: Peer) -> None:
    """Sending said that there is no connection any more."""
    if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
        raise error
    lose(peer)


def lose_connection(writer: RemoteWriter, descriptor: int) -> None:
    """libzmq has closed that descriptor, whose number may be another connection's by now."""
    for peer in writer.peers:
        connection = peer.connection
        if connection and connection.descriptor == descriptor and not connection.is_open:
            lose(peer)


def note_sign_of_life(peer: Peer) -> None:
    """Somebody has proven its key again; the hello follows when its interpreter comes to it."""
    peer.knocked_at = time.monotonic()


def announce_ready(writer: RemoteWriter) -> bool:
    """Tells the readers once everybody has attached, here and elsewhere; with the lock."""
    if not (writer.everybody_is_here or writer.absent() or writer.absent_here()):
        writer.everybody_is_here = True
        for peer in writer.peers:
            writer.tell(peer, What.READY)
    return writer.everybody_is_here


def look(writer: RemoteWriter) -> float | None:
    """Judges every connection; seconds until the next look, None if there is nothing to see."""
    bound = writer.options.liveness
    attached = [peer for peer in writer.peers if peer.state == "running"]
    for peer in attached:
        connection = peer.connection
        if connection is not None and not connection.is_open:
            lose(peer)
        elif connection is not None and connection.is_silent(bound):
            hosts.die(writer, peer, f"its host has not answered for {bound} s")
        if peer.state != "running" or peer.lost_since is None:
            continue
        if time.monotonic() - max(peer.lost_since, peer.knocked_at) >= bound:
            hosts.die(
                writer, peer, f"its connection ended, and it has not come back within {bound} s"
            )
    return min(bound / _LOOKS, _LONGEST_PAUSE) if attached else None


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
