"""Readers that share a host: the writer chooses who relays to whom, and hears of them from it.

A reader says in its HELLO where it may share memory with others. The first who says so relays: its
WELCOME asks it for a ring, with a place for every remote reader, and its reports say where that is.
Whoever comes later from there is told so. He tries to attach to the ring; if he can, he reports
himself there, is SEEN, and needs his connection no more; if he cannot, he says hello again, and
that he shares nothing. So keys, ranks and places are judged here alone, before anybody reads, and
nobody has to meet anywhere else. Places of readers elsewhere are given up by the relays, who ask
which are still free, as readers do that wait for everybody.

Everything in here runs with the writer's lock held.
"""

from __future__ import annotations

import os
import time
from itertools import count
from typing import TYPE_CHECKING

import zmq

from memlane.broadcast.remote.wire import Header, Refused, Report, Ring, Welcome, What, control
from memlane.errors import CorruptMessage

if TYPE_CHECKING:
    from memlane._msgspec import msgspec
    from memlane.broadcast.remote.peer import Peer
    from memlane.broadcast.remote.writer import RemoteWriter


def answer(
    writer: RemoteWriter, route: bytes | None, what: What, body: msgspec.Struct | None = None
) -> None:
    """To who has no stream of messages; he may be gone."""
    frame = control(Header(what, writer.epoch), body)
    try:
        writer.socket.send_multipart([route or b"", frame], zmq.DONTWAIT)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
            raise


def lead(writer: RemoteWriter, peer: Peer) -> bool:
    """Is there a relay for who has just said hello? Then he is shown its ring, once it has one."""
    peer.via = next((p for p in writer.peers if is_relay(p) and p.host == peer.host), None)
    if peer.via is not None and peer.via.ring is not None:
        _show_ring(writer, peer, peer.via.ring)
    return peer.via is not None


def is_relay(peer: Peer) -> bool:
    """Does it pass messages on to others?"""
    return bool(peer.host) and peer.via is None and peer.state == "running"


def ring_of(writer: RemoteWriter, peer: Peer) -> Ring:
    """As `peer` has to make it, or find it."""
    usual = (rank for rank in count() if rank not in writer.local_ranks)
    ranks = [
        rank if other.rank is None else other.rank
        for other, rank in zip(writer.peers, usual, strict=False)
    ]
    geometry = writer.geometry
    return Ring(peer.place, ranks, geometry.max_chunk_bytes, geometry.max_chunks)


def _show_ring(writer: RemoteWriter, peer: Peer, where: tuple[str, str]) -> None:
    ring = ring_of(writer, peer)
    ring.name, ring.ring_id = where
    options = writer.options
    welcome = Welcome(os.getpid(), options.window, options.window_bytes, ring)
    answer(writer, peer.route, What.WELCOME, welcome)


def note_report(writer: RemoteWriter, teller: Peer, report: Report) -> None:
    """What a relay says of the readers behind it, or one of these of itself; of others: nothing."""
    for row in report.rows:
        is_place = 0 <= row.place < len(writer.peers)
        peer = writer.peers[row.place] if is_place else None
        if peer is None or teller not in (peer, peer.via) or row.taken > writer.outbox.next:
            raise CorruptMessage(f"{teller.name(writer.local_ranks)} reports of place {row.place}")
    if teller.via is not None:
        if teller.via.ring != (report.name, report.ring_id):
            raise CorruptMessage(f"{teller.name(writer.local_ranks)} reads from another ring")
    elif is_relay(teller) and teller.ring is None:
        teller.ring = report.name, report.ring_id
        for peer in writer.peers:
            if peer.via is teller and peer.state == "absent":
                _show_ring(writer, peer, teller.ring)
    for row in report.rows:
        peer = writer.peers[row.place]
        if peer.state == "absent" and peer.via is not None and row.state != "absent":
            peer.state, peer.last_progress = "running", time.monotonic()
            writer.note_attendance()
        if peer.state != "running":
            continue
        peer.pid, peer.address = row.pid, (peer.via or peer).address
        if row.taken > peer.taken:
            take(writer, peer, row.taken)
        if row.state == "dead":
            die(writer, peer, "its process ended")
        elif row.state == "closed" and peer is teller:
            peer.has_left = True
        elif row.state == "closed":
            peer.state = "closed"
    if teller.via is not None and teller.state == "running":
        answer(writer, teller.route, What.SEEN)
    elif teller.via is not None:
        text = f"{teller.name(writer.local_ranks)} is {teller.state}"
        answer(writer, teller.route, What.REFUSED, Refused("gone", text))


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


def die(writer: RemoteWriter, peer: Peer, why: str) -> None:
    """Its process is gone. If its reader had closed, those behind it are the ones who died."""
    writer.room = -1
    peer.state = "closed" if peer.has_left else "dead"
    peer.died = why
    # If it lives, and is reached again by the same connection, it would wait for ever.
    writer.tell(peer, What.REFUSED, body=gone(peer))
    peer.connection = None
    note_end_of_relay(writer, peer)


def gone(peer: Peer) -> Refused:
    """What a reader that counts as dead is told."""
    return Refused("gone", f"reader {peer.rank} counts as dead: {peer.died}")


def note_end_of_relay(writer: RemoteWriter, relay: Peer) -> None:
    """Who reads behind it is dead, too; who was about to attach there reads for himself."""
    for peer in writer.peers:
        if peer.via is not relay:
            continue
        if peer.state == "running":
            how = relay.died or "it has closed"
            name = relay.name(writer.local_ranks)
            die(writer, peer, f"{name} no longer relays to it: {how}")
        elif peer.state == "absent":
            peer.via, peer.host, peer.session = None, "", b""
            text = "the relay of that host has ended"
            answer(writer, peer.route, What.REFUSED, Refused("no_relay", text))
