"""The places of a queue's remote readers: who has which, and who relays to whom.

A reader's HELLO tells which other readers it may share memory with. The first reader of a host
relays: its WELCOME asks for a ring with a place for every remote reader, and its REPORT says where
that ring is. The WELCOME of a later reader on that host names the ring. If that reader can attach
to it, it sends a REPORT on itself, gets SEEN, and keeps its connection idle; otherwise it sends
another HELLO, without a host. So the writer alone judges keys, ranks and places, before anyone
reads, and readers need no other meeting point. A relay releases the places of readers on other
hosts: it learns by ASK which places are still free.

When a relay ends, the readers behind it find its ring dead and send HELLO for streams of their own.
One that does not report, because it is stopped perhaps, ends as a relay too.
"""

from __future__ import annotations

from itertools import count, islice
from typing import TYPE_CHECKING

from memlane._base.naming import MOST_NAMED, names_of, not_readmitted
from memlane.broadcast.protocol.descriptions import owner, statistics_of, text_of
from memlane.broadcast.protocol.frames import Report, ReportRow, Ring
from memlane.broadcast.protocol.peer import Peer
from memlane.broadcast.protocol.states import Life, Link
from memlane.errors import CorruptMessage, InvalidArgument, LayoutMismatch, ReaderDied

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from memlane.broadcast.statistics import ReaderStatistics


class Places:
    """All places, in the order in which a handle lists their keys.

    Args:
        number: of remote readers.
        local_ranks: the ranks of readers on the writer's host, which have no place here.
        late: nobody waits for readers before they attach.
    """

    def __init__(self, number: int, local_ranks: list[int], *, late: bool = False) -> None:
        usual = (rank for rank in count() if rank not in local_ranks)
        self._local_ranks = local_ranks
        self.peers = [Peer(place, rank, late) for place, rank in enumerate(islice(usual, number))]
        self._by_route: dict[bytes, Peer] = {}
        self.former_pids: set[int] = set()  # of readers whose places others have

    # Who is where -----------------------------------------------------------------------------

    def at(self, route: bytes) -> Peer | None:
        """The peer whose latest connection that is."""
        return self._by_route.get(route)

    def move(self, peer: Peer, route: bytes) -> bytes | None:
        """Assigns the connection to the peer; returns the peer's former one, if another."""
        former = peer.route
        if former is not None and former != route and self._by_route.get(former) is peer:
            del self._by_route[former]
        self._by_route[route] = peer
        return former if former != route else None

    def is_remote(self, rank: int) -> bool:
        """Returns whether a remote reader may have that rank."""
        return 0 <= rank < 1 << 63 and rank not in self._local_ranks

    def absent(self) -> list[Peer]:
        """The readers that are expected, and have not attached."""
        return [peer for peer in self.peers if peer.is_missing]

    def pids(self) -> set[int]:
        """The pids of all readers that have ever attached."""
        return self.former_pids | {peer.pid for peer in self.peers if not peer.is_absent}

    def absent_texts(self, here: list[str], sent: int, now: float) -> list[str]:
        """The absent readers, the local ones (`here`) first; only the first few by name."""
        absent = self.absent()
        named = [text_of(peer, sent, now) for peer in islice(absent, MOST_NAMED)]
        return here + named + ["another reader"] * (len(absent) - MOST_NAMED)

    def dead(self) -> Iterator[Peer]:
        return (peer for peer in self.peers if peer.life is Life.DEAD)

    def failed(self) -> Iterator[Peer]:
        """The readers that are dead, or cannot attach because they are of another version."""
        return (peer for peer in self.peers if peer.life is Life.DEAD or peer.other_version)

    def holders(self, rank: int) -> list[Peer]:
        """Returns the peers that have, or had, that rank. A signal handler may have raised before
        a free place was assigned, or after its reader left."""
        has_rank = (peer for peer in self.peers if peer.rank == rank and peer.session)
        return [peer for peer in has_rank if peer.life is not Life.FREE]

    def was_released(self, rank: int) -> bool:
        """Returns whether that rank was released before it attached."""
        return any(peer.rank == rank and peer.was_released for peer in self.peers)

    def owners(self) -> str:
        """Names the owners of all places, as one text."""
        return names_of([owner(peer) for peer in self.peers])

    def spare_for(self, rank: int) -> Peer | None:
        """A place whose reader was released before it attached, if no other is left for `rank`."""
        for peer in self.peers:
            if peer.rank == rank or (peer.rank is None and peer.is_absent):
                return None
        return next((peer for peer in self.peers if peer.was_released), None)

    def kept_for(self, rank: int) -> Peer:
        """The place that is kept for that rank from now on."""
        for peer in self.peers:
            if peer.rank == rank:
                return peer
        free = [peer for peer in self.peers if peer.rank is None and peer.is_absent]
        usual = usual_place(rank, self._local_ranks)
        if not free:
            raise InvalidArgument(
                f"the queue has no reader {rank}: the {len(self.peers)} places for remote readers "
                f"belong to {self.owners()}"
            )
        found = next((peer for peer in free if peer.place == usual), free[-1])
        found.keep_for(rank)
        return found

    def give_up(self, rank: int, chosen: Peer) -> None:
        """Frees the place that was kept for a reader which has chosen another."""
        for other in self.peers:
            if other is not chosen and other.rank == rank:
                other.keep_for(None)

    def release(self, rank: int, now: float) -> None:
        """The application goes on without that rank."""
        peer = self._of(rank)
        if peer.is_here:
            raise InvalidArgument(
                f"reader {rank} is connected from {peer.address} (pid {peer.pid}): only a dead or "
                f"absent reader can be released; end its process first"
            )
        peer.release(rank, now)

    def ended(self, rank: int) -> Peer:
        """Returns the peer that has had the place that another process may take."""
        peer = self._of(rank)
        if peer.life is not Life.CLOSED:
            relays = peer.life is Life.RELAYING
            raise not_readmitted(rank, "still relaying" if relays else peer.state)
        return peer

    def readmit(self, old: Peer, new: Peer) -> None:
        """Another process may take the place."""
        self.former_pids.add(old.pid)
        self.peers[old.place] = new
        self.forget_former(old)

    def forget_former(self, peer: Peer) -> None:
        """Forgets a reader whose place is another's, unless it is connected: it is still told."""
        if peer is self.peers[peer.place] or peer.is_connected or peer.route is None:
            return
        if self._by_route.get(peer.route) is peer:
            del self._by_route[peer.route]

    def _of(self, rank: int) -> Peer:
        usual = usual_place(rank, self._local_ranks)
        found = [peer for peer in self.peers if peer.rank == rank] or [
            peer for peer in self.peers if peer.rank is None and peer.place == usual
        ]
        if not found or rank in self._local_ranks:
            raise InvalidArgument(f"the queue has no reader {rank} on another host")
        return found[0]

    # How they are --------------------------------------------------------------------------

    def connections(self) -> list[bytes]:
        """The connections that readers need, so that their loss has to be reported."""
        return [
            peer.route
            for peer in self.peers
            if peer.route is not None and peer.is_connected and (peer.is_here or peer.is_absent)
        ]

    def talkative(self) -> list[bytes]:
        """The connections that have sent frames without progress: their answers may be unread."""
        return [
            peer.route
            for peer in self.peers
            if peer.idle_frames and peer.route is not None and peer.is_connected
        ]

    def has_lost(self) -> bool:
        """Returns whether the clock of any reader runs."""
        return any(peer.link is Link.LOST for peer in self.peers)

    def deserted_since(self) -> float | None:
        """Returns when the last reader closed; None unless all have closed or were released."""
        if any(peer.is_waited_for or peer.life is Life.DEAD for peer in self.peers):
            return None
        return max(peer.ended_at for peer in self.peers) or None

    def statistics(self, sent: int) -> tuple[ReaderStatistics, ...]:
        """A row for each reader, after `sent` messages."""
        return tuple(statistics_of(peer, sent) for peer in self.peers)

    def raise_death(self) -> None:
        """Raises ReaderDied until the dead reader is released; LayoutMismatch for one of another
        version, until it is released or one of this version has attached."""
        for peer in self.failed():
            rank = peer.rank_or_usual
            if peer.other_version:
                raise LayoutMismatch(
                    f"{peer.other_version}, or call release_reader({rank}) to continue without it"
                )
            raise ReaderDied(
                rank,
                peer.pid,
                f" at {peer.address} after {peer.taken} messages: {peer.died}; call "
                f"release_reader({rank}) to continue without it",
            )

    # Relays -----------------------------------------------------------------------------------

    def relay_at(self, host: str) -> Peer | None:
        """The relay of that host."""
        return next((peer for peer in self.peers if peer.is_relay and peer.host == host), None)

    def behind(self, relay: Peer) -> Iterator[Peer]:
        return (peer for peer in self.peers if peer.via is relay)

    def parted(self) -> Iterator[Peer]:
        """Returns the readers whose relay is gone."""
        return (peer for peer in self.peers if peer.via is not None and not peer.via.is_relay)

    def silent_relays(self, since: float) -> Iterator[Peer]:
        """Relays with readers behind them that have not reported since then."""
        for peer in self.peers:
            is_silent = peer.is_connected and peer.reported_at <= since
            if is_silent and peer.is_relay and any(self.behind(peer)):
                yield peer

    def ring_of(self, peer: Peer, sizes: tuple[int, int]) -> Ring:
        """The ring that `peer` makes or attaches to; `sizes` are bytes per chunk, and chunks."""
        ranks = [other.rank_or_usual for other in self.peers]
        where = ("", "") if peer.via is None or peer.via.ring is None else peer.via.ring
        return Ring(peer.place, ranks, *sizes, *where)

    def rows_of(self, teller: Peer, report: Report, sent: int) -> list[tuple[Peer, ReportRow]]:
        """The rows that count: a relay's on itself and the readers behind it, or such a reader's on
        itself. Others are ignored, because their places in that ring were given up."""
        for row in report.rows:
            if not 0 <= row.place < len(self.peers) or row.taken > sent:
                raise CorruptMessage(f"place {teller.place} sent an invalid row: {row}")
        if not report.name:  # a WELCOME without one would make a second relay
            raise CorruptMessage(f"place {teller.place} reports a ring without a name")
        if teller.via is not None and teller.via.ring != (report.name, report.ring_id):
            raise CorruptMessage(f"place {teller.place} reads from a ring that it was not given")
        rows = [(self.peers[row.place], row) for row in report.rows]
        return [(peer, row) for peer, row in rows if teller in (peer, peer.via)]


def usual_place(rank: int, local_ranks: Collection[int]) -> int:
    """The default place of a rank; beyond the last place for a rank that is higher than usual."""
    return rank - sum(1 for local in set(local_ranks) if local < rank)
