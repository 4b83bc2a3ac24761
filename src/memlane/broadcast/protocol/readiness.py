"""A writer tells its readers who has not attached, and when everybody has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane._base.naming import MOST_NAMED
from memlane.broadcast.protocol.frames import Absent, What

if TYPE_CHECKING:
    from memlane.broadcast.protocol.outbox import Outbox
    from memlane.broadcast.protocol.peer import Peer
    from memlane.broadcast.protocol.places import Places
    from memlane.broadcast.protocol.replies import Replies


class Readiness:
    """Answers the readers that ask who is absent.

    Attributes:
        is_asked: some reader has asked; see `answer`.
        is_everybody_here: it was announced that all have attached, here and elsewhere.
    """

    def __init__(self, places: Places, outbox: Outbox, replies: Replies) -> None:
        self._places, self._outbox, self._replies = places, outbox, replies
        self.is_asked = self.is_everybody_here = False

    def ask(self, peer: Peer) -> None:
        """That reader asks."""
        peer.question()
        self.is_asked = True

    def answer(self, here: list[str], now: float) -> None:
        """Answers who asked; `here` names the absent readers on this host."""
        self.is_asked = False
        frame = self._replies.frame(What.READY)
        if not self.is_everybody_here:
            names = self._places.absent_texts(here, self._outbox.next, now)
            free = [peer.place for peer in self._places.absent()]
            absent = Absent(names[:MOST_NAMED], free, len(names) - len(free))
            frame = self._replies.frame(What.ABSENT, body=absent)
        for peer in self._places.peers:
            if peer.asks:
                peer.answer(frame)

    def announce(self) -> None:
        """Tells the readers that everybody has attached, here and elsewhere."""
        if not self.is_everybody_here:
            self.is_everybody_here = True
            for peer in self._places.peers:
                peer.say(self._replies.frame(What.READY))
