"""Relays: readers that share a host share one stream of messages. Decided from peers only.

A reader says in its HELLO where it may share memory with others. The first that says so relays: its
WELCOME asks it for a ring, with a place for every remote reader, and its reports say where that is.
A later one from there is told so. It tries to attach to the ring; if it can, it reports
himself there, is SEEN, and keeps his connection for what may come; if he cannot, he says hello
again, and that he shares nothing. So keys, ranks and places are judged by the writer alone, before
anybody reads, and nobody has to meet anywhere else. Places of readers elsewhere are given up by the
relays, who ask which are still free, as readers do that wait for everybody.

When a relay ends, those behind it find its ring dead, and say hello for a stream of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane.broadcast.remote.frames import Report, ReportRow, Ring
from memlane.errors import CorruptMessage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memlane.broadcast.remote.peer import Peer


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
    """As `peer` has to make it, or to find it; of chunks of such bytes, so many."""
    ranks = [other.usual_rank(local_ranks) for other in peers]
    where = ("", "") if peer.via is None or peer.via.ring is None else peer.via.ring
    return Ring(peer.place, ranks, *sizes, *where)


def rows_of(
    peers: Sequence[Peer], teller: Peer, report: Report, sent: int
) -> list[tuple[Peer, ReportRow]]:
    """A relay speaks for itself and those behind it, and these for themselves, of what was sent.
    What it says of others is left out: their places in its ring were given up."""
    for row in report.rows:
        if not 0 <= row.place < len(peers) or row.taken > sent:
            raise CorruptMessage(f"place {teller.place} reports of {row}")
    if teller.via is not None and teller.via.ring != (report.name, report.ring_id):
        raise CorruptMessage(f"place {teller.place} reads from another ring than it was shown")
    rows = [(peers[row.place], row) for row in report.rows]
    return [(peer, row) for peer, row in rows if teller in (peer, peer.via)]
