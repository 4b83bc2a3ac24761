"""How much may be on its way: to each reader so many messages and so many bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memlane.broadcast.remote.outbox import Outbox
    from memlane.broadcast.remote.peer import Peer


class Windows:
    """The windows of all readers. A message larger than a window of bytes travels alone.

    Absent readers have one, too: they get everything from the first message on.
    """

    def __init__(self, peers: list[Peer], outbox: Outbox, messages: int, nbytes: int) -> None:
        self._peers = peers
        self._outbox = outbox
        self._messages = messages
        self._bytes = nbytes

    def has_room(self, size: int) -> bool:
        """May one more message of that size be on its way to everybody?"""
        return not any(self._is_in_the_way(peer, size) for peer in self._peers)

    def _is_in_the_way(self, peer: Peer, size: int) -> bool:
        if not peer.is_waited_for:
            return False
        in_flight = self._outbox.bytes - peer.taken_bytes
        is_too_much = in_flight > 0 and in_flight + size > self._bytes
        return is_too_much or self._outbox.next - peer.taken >= self._messages

    def in_the_way(self, size: int) -> list[Peer]:
        """The culprit first: who is without a connection, then the longest silent."""
        found = [peer for peer in self._peers if self._is_in_the_way(peer, size)]
        return sorted(found, key=lambda peer: (peer.lost_since is None, peer.last_progress))

    def room(self) -> tuple[int, int]:
        """So many messages, of so many bytes together, have room everywhere; -1 bytes: none has."""
        messages, nbytes = self._messages, self._bytes
        for peer in self._peers:
            if peer.is_waited_for:
                messages = min(messages, self._messages - self._outbox.next + peer.taken)
                nbytes = min(nbytes, self._bytes - self._outbox.bytes + peer.taken_bytes)
        return (messages, nbytes) if messages > 0 else (0, -1)

    def drop_taken(self) -> None:
        """Nobody needs any more what all have taken."""
        taken = [peer.taken for peer in self._peers if peer.is_waited_for]
        self._outbox.drop_before(min(taken, default=self._outbox.next))
