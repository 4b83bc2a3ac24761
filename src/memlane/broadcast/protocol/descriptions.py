"""A writer's remote readers in words and numbers: for blame, errors, statistics and observers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane._base.blame import Facts, State, sentence
from memlane.broadcast.protocol.states import Life, Link
from memlane.broadcast.statistics import ReaderStatistics

if TYPE_CHECKING:
    from memlane.broadcast.protocol.peer import Peer


def owner(peer: Peer) -> str:
    """Names the owner of the place."""
    if peer.rank is None:
        return "nobody"
    if peer.was_released:
        return f"{peer.name} (released)"
    return peer.name + (" (never attached)" if peer.is_absent else f" ({peer.state})")


def facts_of(peer: Peer, sent: int, now: float) -> Facts:
    """Returns the facts by which blame is decided and worded; `sent` messages were sent."""
    if peer.life is Life.ATTACHING and peer.via is not None:
        waits = f"which has not reported for {now - peer.via.reported_at:.1f} s"
        doing = f"attaching behind {peer.via.name}'s relay, {waits}"
        return Facts(peer.name, "absent", doing=doing)
    if peer.is_absent:
        return Facts(peer.name, "absent", doing=peer.other_version)
    # Only its own host knows whether it is stopped.
    state: State = peer.state
    doing = "connected" if peer.is_here else ""
    if peer.lost_since is not None:
        state, doing = "lost", f"without a connection for {now - peer.lost_since:.1f} s"
    more = () if peer.via is None else (f"behind {peer.via.name}'s relay",)
    return Facts(
        peer.name,
        state,
        peer.pid,
        address=peer.address,
        doing=doing,
        behind=sent - peer.taken,
        silent_for=now - peer.last_progress,
        more=more,
    )


def text_of(peer: Peer, sent: int, now: float) -> str:
    """Rank, pid and address, how far behind, and since when."""
    return sentence(facts_of(peer, sent, now))


def statistics_of(peer: Peer, sent: int) -> ReaderStatistics:
    was_here = not peer.is_absent and peer.pid != 0
    is_lost = peer.life is Life.RUNNING and peer.link is Link.LOST
    return ReaderStatistics(
        rank=peer.rank_or_usual,
        pid=peer.pid if was_here else None,
        state="unknown" if is_lost else peer.state,
        behind=sent - peer.taken if peer.is_waited_for else 0,
        last_progress=peer.last_progress if was_here else None,
        is_waiting=False,
        views=0,
        views_since=None,
        address=peer.address if was_here else None,
    )
