"""Decides which readers may attach or reconnect. Changes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane.broadcast.protocol.frames import Hello, Refused
from memlane.broadcast.protocol.states import Life

if TYPE_CHECKING:
    from memlane.broadcast.protocol.outbox import Outbox
    from memlane.broadcast.protocol.peer import Peer
    from memlane.broadcast.protocol.places import Places


NO_RELAY = Refused("no_relay", "the relay on that host has ended")


def refusal(places: Places, peer: Peer, hello: Hello, outbox: Outbox) -> Refused | None:
    """Returns why a reader that has proven the key of `peer` is refused; None if it is not."""
    rank = hello.rank
    if not places.is_remote(rank):
        return Refused("foreign", f"the queue has no remote reader {rank}")
    if peer.life is Life.DEAD:
        return declared_dead(peer)
    if peer.session == hello.session and not peer.is_absent:
        if not peer.is_here:
            return Refused("gone", f"reader {rank} is {peer.state}")
        taken, (sequence, piece) = peer.wants(hello)
        if not hello.is_behind and not (
            peer.taken <= taken <= sequence and outbox.can_resume_at(sequence, piece)
        ):
            at = f"frame {piece} of message {sequence}"
            return Refused("gone", f"reader {rank} cannot resume at {at}")
        return None
    for other in places.holders(rank):
        if not _may_replace(peer, other, hello):
            state = "attaching" if other.is_absent else other.state
            return Refused(
                "rank_taken",
                f"reader {rank} cannot attach: its place was taken by pid {other.pid} at "
                f"{other.address}, which is {state}",
            )
    if places.was_released(rank):  # all places are meant for others
        return Refused("place_taken", f"reader {rank} was released before it attached")
    if not peer.is_absent or peer.rank not in (None, rank):
        return Refused("place_taken", f"the places belong to {places.owners()}")
    if (hello.taken, hello.sequence, hello.piece, hello.is_behind) != (0, 0, 0, False):
        return Refused("foreign", "a new reader must begin with the first message")
    return None


def replaced(hello: Hello) -> Refused:
    """The refusal for a reader whose place is another's by now. A new one that has only found an
    old key may have another, whose place is free."""
    is_new = hello.number == 1 and (hello.taken, hello.sequence, hello.piece) == (0, 0, 0)
    text = f"the place of that key, for which reader {hello.rank} asks, is another's by now"
    return Refused("place_taken" if is_new else "gone", text)


def declared_dead(peer: Peer) -> Refused:
    """The refusal for a reader whose place is dead or closed."""
    why = f": {peer.died}" if peer.died else ""
    return Refused("gone", f"reader {peer.rank} is {peer.state}{why}")


def _may_replace(peer: Peer, other: Peer, hello: Hello) -> bool:
    """Returns whether this HELLO may replace `other`. On its host, attaching to the ring tells if
    that one died."""
    if other is not peer or not peer.is_absent:
        return False
    return peer.session == hello.session or peer.host == hello.host
