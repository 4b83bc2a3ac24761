"""The end of a writer's messages: who has still to confirm it, and how long that is waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane.broadcast.protocol.descriptions import text_of
from memlane.broadcast.protocol.states import Life, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane.broadcast.protocol.outbox import Outbox
    from memlane.broadcast.protocol.peer import Peer
    from memlane.broadcast.protocol.places import Places

REPEAT = 0.5
"""Seconds until an unanswered END is sent again."""


class Ending:
    """Asks every reader to confirm END.

    Args:
        liveness: seconds without progress after which readers are no longer waited for.
        frame: makes END; its sequence is the argument.
    """

    def __init__(
        self, places: Places, outbox: Outbox, liveness: float, frame: Callable[[int], bytes]
    ) -> None:
        self._places, self._outbox, self._liveness, self._frame = places, outbox, liveness, frame
        self._since: float | None = None
        self._dead_before: list[Peer] = []  # before it began

    @property
    def has_begun(self) -> bool:
        """True if there will be no more messages."""
        return self._since is not None

    def begin(self, now: float) -> None:
        if self._since is None:
            self._dead_before = list(self._places.dead())
            self._since = now

    def delay(self, now: float) -> None:
        """Leaves out the time until `now`, in which nothing could be received."""
        if self._since is not None:
            self._since = now  # what came meanwhile has yet to be received

    def tell(self, peer: Peer, now: float) -> float | None:
        """Queues END for a reader that has everything; returns when to do so again."""
        if self._since is None or peer.link is not Link.STREAMING or peer.has_heard_end:
            return None
        if now >= peer.end_due and peer.cursor == (self._outbox.next, 0):
            peer.tell_end(self._frame(self._outbox.next), now + REPEAT)
        return peer.end_due if peer.end_due > now else None

    def unfinished(self) -> list[Peer]:
        """Readers that still have to confirm END; absent ones, too, if any message was sent."""
        return [
            peer
            for peer in self._places.peers
            if (peer.owes_end and not self._is_over(peer))
            or (peer.is_missing and self._outbox.next > peer.first)
        ]

    def _is_over(self, peer: Peer) -> bool:
        """Returns whether it is a relay that has closed and lost its connection, with no readers
        left behind it."""
        is_lost = peer.life is Life.RELAYING and not peer.is_connected
        return is_lost and not any(
            other.is_here or other.is_absent for other in self._places.behind(peer)
        )

    def missed(self) -> list[Peer]:
        """Readers that may be alive, but have not confirmed END or not taken everything; not those
        that were dead before it ended, nor a relay that has closed as a reader."""
        owing = self.unfinished()
        return [
            peer
            for peer in self._places.peers
            if peer not in self._dead_before
            and (
                (peer in owing and peer.life is not Life.RELAYING)
                or (peer.via in owing and peer.life is not Life.CLOSED)
                or (peer.is_silent and peer.taken < self._outbox.next)
            )
        ]

    def is_stuck(self, now: float) -> bool:
        """Returns whether no unfinished reader has made progress for too long. A reader without a
        connection has its own bound, after which it counts as dead, and one more if it proves its
        key again."""
        waiting = self.unfinished()
        return now - self._progressed_at(waiting, now) >= self._bounds(waiting) * self._liveness

    def _progressed_at(self, waiting: list[Peer], now: float) -> float:
        """Returns when any of them made progress, or when the end began, whichever is later."""
        since = now if self._since is None else self._since
        return max(since, max((peer.last_progress for peer in waiting), default=now))

    def _bounds(self, waiting: list[Peer]) -> int:
        return 3 if any(peer.link is Link.LOST for peer in waiting) else 1

    def texts(self, peers: list[Peer], now: float) -> list[str]:
        return [text_of(peer, self._outbox.next, now) for peer in peers]
