"""Relays: readers that share a host share one stream of messages. Decided from peers only.

A reader's HELLO tells which other readers it may share memory with. The first reader of a host
relays: its WELCOME asks for a ring with a place for every remote reader, and its REPORT says where
that ring is. The WELCOME of a later reader on that host names the ring. If that reader can attach
to it, it sends a REPORT on itself, gets SEEN, and keeps its connection idle; otherwise it sends
another HELLO, without a host. So the writer alone judges keys, ranks and places, before anyone
reads, and readers need no other meeting point. A relay releases the places of readers on other
hosts: it learns by ASK which places are still free.

When a relay ends, the readers behind it find its ring dead and send HELLO for streams of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane.broadcast.protocol.frames import Report, ReportRow, Ring
from memlane.errors import CorruptMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memlane.broadcast.protocol.peer import Peer


def relay_at(peers: Sequence[Peer], host: str) -> Peer | None:
    """The relay of that host."""
    return next((peer for peer in peers if is_relay(peer) and peer.host == host), None)


def is_relay(peer: Peer) -> bool:
    """Does it pass messages on to others?"""
    return bool(peer.host) and peer.via is None and peer.state == "running"


def behind(peers: Sequence[Peer], relay: Peer) -> Iterator[Peer]:
    return (peer for peer in peers if peer.via is relay)


def ring_of(
    peers: Sequence[Peer], peer: Peer, local_ranks: list[int], sizes: tuple[int, int]
) -> Ring:
    """The ring that `peer` makes or attaches to; `sizes` are bytes per chunk, and chunks."""
    ranks = [other.usual_rank(local_ranks) for other in peers]
    where = ("", "") if peer.via is None or peer.via.ring is None else peer.via.ring
    return Ring(peer.place, ranks, *sizes, *where)


def rows_of(
    peers: Sequence[Peer], teller: Peer, report: Report, sent: int
) -> list[tuple[Peer, ReportRow]]:
    """The rows that count: a relay's on itself and the readers behind it, or such a reader's on
    itself. Others are ignored, because their places in that ring were given up."""
    for row in report.rows:
        if not 0 <= row.place < len(peers) or row.taken > sent:
            raise CorruptMessage(f"place {teller.place} sent an invalid row: {row}")
    if teller.via is not None and teller.via.ring != (report.name, report.ring_id):
        raise CorruptMessage(f"place {teller.place} reads from a ring that it was not given")
    rows = [(peers[row.place], row) for row in report.rows]
    return [(peer, row) for peer, row in rows if teller in (peer, peer.via)]
