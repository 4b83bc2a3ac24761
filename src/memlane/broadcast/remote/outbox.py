"""Messages that were sent and may be needed again, and how many may be on their way.

No sockets and no clock. A message is staged before anything of it is sent, and then committed or
dropped as a whole, so that an interruption in between leaves nothing half done.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from memlane.broadcast.remote.frames import (
    PIECE,
    SMALL,
    Header,
    Kind,
    What,
    whole_header,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memlane._native import Encoder
    from memlane.broadcast.remote.peer import Cursor, Peer


class Piece(NamedTuple):
    """What is sent at once: a header and what it announces."""

    head: bytes  # with the payload behind it, if that is small
    payload: memoryview | None = None  # of memory that nobody changes any more


class Message(NamedTuple):
    """One message as it travels; its memory is private, and shared by all its readers."""

    sequence: int
    size: int
    end: int  # bytes of all messages up to and with this one
    pieces: Sequence[Piece]


def pieces_of(encoder: Encoder, epoch: int, sequence: int, total: int) -> list[Piece]:
    """Of a large message: views of its bytes, which libzmq sends from where they lie. Bytes stay
    the caller's object, which cannot change; everything else is copied, once."""
    kind = encoder.kind
    if total <= SMALL:
        return [Piece(encoder.joined(whole_header(epoch, sequence, kind, total)))]
    memory = memoryview(encoder.settled())  # type: ignore[arg-type]
    count = -(-total // PIECE)
    return [
        Piece(
            Header(What.MESSAGE, epoch, sequence, kind, n, count, n * PIECE, total).pack(),
            memory[n * PIECE : (n + 1) * PIECE],
        )
        for n in range(count)
    ]


def raw_piece(epoch: int, sequence: int) -> list[Piece]:
    """A message that says no more than that there was one."""
    return [Piece(whole_header(epoch, sequence, Kind.RAW, 0))]


class Outbox:
    """The messages from the oldest that somebody has not taken, to the newest.

    Every reader has a window of messages and bytes; a message larger than that travels alone.
    Absent readers have one, too: they get everything from the first message on.
    """

    def __init__(self, peers: list[Peer], window: int, window_bytes: int) -> None:
        self._peers = peers
        self._window = window
        self._window_bytes = window_bytes
        self._messages: deque[Message] = deque()
        self.staged: tuple[Message, int] | None = None
        self.next = 0  # sequence of the message that comes next
        self.bytes = 0  # of all messages that there ever were

    @property
    def first(self) -> int:
        """The oldest that is still here."""
        return self.next - len(self._messages)

    # Messages ---------------------------------------------------------------------------------

    def stage(self, size: int, pieces: Sequence[Piece], mark: int = 0) -> None:
        """The next message, which the ring gets first: it is at `mark` before that."""
        self.staged = Message(self.next, size, self.bytes + size, pieces), mark

    def commit(self) -> None:
        """What is staged is a message from now on."""
        if self.staged is None:
            return
        message = self.staged[0]
        # A signal handler may raise behind a call only: so all of this happens, or nothing does.
        self.next, self.bytes, self.staged = message.sequence + 1, message.end, None
        self._messages.append(message)

    def settle(self, mark: int) -> None:
        """After an interruption: the ring is at `mark`, and so has the message or has it not."""
        if self.staged is not None and self.staged[1] != mark:
            self.commit()
        self.staged = None

    def frame_for(self, peer: Peer) -> tuple[Piece, Cursor | None] | None:
        """What comes next for that reader, and its cursor behind that; None: nothing."""
        if peer.said:
            return Piece(peer.said[0]), None
        sequence, piece = peer.cursor
        if not peer.is_streaming or not self.first <= sequence < self.next:
            return None
        pieces = self._messages[sequence - self.first].pieces
        is_last = piece + 1 == len(pieces)
        return pieces[piece], (sequence + 1, 0) if is_last else (sequence, piece + 1)

    def end_of(self, sequence: int) -> int:
        """Bytes of all messages before `sequence`."""
        if sequence >= self.next or not self._messages:
            return self.bytes
        message = self._messages[sequence - self.first]
        return message.end - message.size

    def drop_taken(self) -> None:
        """Nobody needs any more what all have taken."""
        taken = min((p.taken for p in self._peers if p.is_waited_for), default=self.next)
        for _ in range(taken - self.first):
            self._messages.popleft()

    # Windows ----------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """May one more message of that size be on its way to everybody?"""
        return not any(self._is_in_the_way(peer, size) for peer in self._peers)

    def _is_in_the_way(self, peer: Peer, size: int) -> bool:
        if not peer.is_waited_for:
            return False
        in_flight = self.bytes - peer.taken_bytes
        is_too_much = in_flight > 0 and in_flight + size > self._window_bytes
        return is_too_much or self.next - peer.taken >= self._window

    def in_the_way(self, size: int) -> list[Peer]:
        """The culprit first: readers without a connection, then the longest silent."""
        found = [peer for peer in self._peers if self._is_in_the_way(peer, size)]
        return sorted(found, key=lambda peer: (peer.lost_since is None, peer.last_progress))

    def room(self) -> tuple[int, int]:
        """So many messages, of so many bytes together, have room everywhere; -1 bytes: none has."""
        messages, nbytes = self._window, self._window_bytes
        for peer in self._peers:
            if peer.is_waited_for:
                messages = min(messages, self._window - self.next + peer.taken)
                nbytes = min(nbytes, self._window_bytes - self.bytes + peer.taken_bytes)
        return (messages, nbytes) if messages > 0 else (0, -1)
