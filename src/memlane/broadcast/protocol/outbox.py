"""Sent messages that may be needed again, and the windows that limit how many are in flight.

No sockets and no clock. A message is staged before any of it is sent, and then committed or dropped
as a whole, so that an interruption in between leaves nothing half done.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from memlane._base.blame import listed
from memlane.broadcast.protocol.descriptions import facts_of
from memlane.broadcast.protocol.frames import (
    PIECE,
    SMALL,
    Header,
    Kind,
    What,
    whole_header,
)
from memlane.broadcast.protocol.states import Link

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memlane._native import Encoder
    from memlane.broadcast.protocol.peer import Cursor, Peer


Piece = tuple[bytes] | tuple[bytes, memoryview]
"""One frame: a header, and its payload in memory that no longer changes. A small payload is behind
the header in the same bytes."""


class Message(NamedTuple):
    """One message as it is sent, or several that share a frame; the memory is private, and shared
    by all readers."""

    sequence: int  # of the first
    size: int
    end: int  # bytes of all messages up to and including these
    pieces: Sequence[Piece]
    messages: int = 1

    @property
    def next(self) -> int:
        """The sequence after the last."""
        return self.sequence + self.messages


_sequence = attrgetter("sequence")


def piece_of(encoder: Encoder, epoch: int, sequence: int, total: int) -> Piece:
    """The frame of a message of at most PIECE bytes."""
    if total <= SMALL:
        return (encoder.joined(whole_header(epoch, sequence, encoder.kind, total)),)
    return pieces_of(encoder, epoch, sequence, total)[0]


def pieces_of(encoder: Encoder, epoch: int, sequence: int, total: int) -> list[Piece]:
    """The frames of a message. Those of a large one are views, which libzmq sends without a copy:
    bytes stay the caller's object, which cannot change; everything else is copied once."""
    if total <= SMALL:
        return [piece_of(encoder, epoch, sequence, total)]
    kind, memory = encoder.kind, memoryview(encoder.settled())  # type: ignore[arg-type]
    count = -(-total // PIECE)
    return [
        (
            Header(What.MESSAGE, epoch, sequence, kind, n, count, n * PIECE, total).pack(),
            memory[n * PIECE : (n + 1) * PIECE],
        )
        for n in range(count)
    ]


def raw_piece(epoch: int, sequence: int) -> list[Piece]:
    """A message without content, in place of a chunk that was filled by hand."""
    return [(whole_header(epoch, sequence, Kind.RAW, 0),)]


class Outbox:
    """The messages from the oldest that some reader has not taken to the newest.

    Every reader has a window of messages and bytes; a message larger than that is sent alone.
    Absent readers have one too, because they get everything from the first message on.
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
        return self._messages[0].sequence if self._messages else self.next

    def _at(self, sequence: int) -> Message:
        """The message, or the frame that it is in; the oldest that is kept for earlier ones."""
        if sequence >= self._messages[-1].sequence:
            return self._messages[-1]
        return self._messages[max(0, bisect_right(self._messages, sequence, key=_sequence) - 1)]

    # Messages ---------------------------------------------------------------------------------

    def stage(self, size: int, pieces: Sequence[Piece], mark: int = 0) -> None:
        """Stages the next message. The ring gets it first; its position before that is `mark`."""
        self.staged = Message(self.next, size, self.bytes + size, pieces), mark

    def commit(self) -> int:
        """Makes the staged message, if there is one, the newest; returns its size."""
        if self.staged is None:
            return 0
        message = self.staged[0]
        self._add(message, None)
        return message.size

    def _add(self, message: Message, staged: tuple[Message, int] | None) -> None:
        """Makes it the newest. A signal handler can raise only after a call, so either all of this
        happens or none."""
        before = self.next, self.bytes, self.staged
        self.next, self.bytes, self.staged = message.next, message.end, staged
        try:
            self._messages.append(message)
        except MemoryError:
            self.next, self.bytes, self.staged = before
            raise

    def append_batch(self, first: int, frame: bytes, size: int, count: int) -> None:
        """Makes `count` small messages that share a frame the newest, unless they are already."""
        if first == self.next:
            self.append((frame,), size, count)

    def append(self, piece: Piece, size: int, count: int = 1) -> None:
        """Makes a message in one piece the newest, or `count` that share a frame; there is no ring
        that must have it first."""
        self._add(Message(self.next, size, self.bytes + size, (piece,), count), self.staged)

    def settle(self, mark: int) -> None:
        """After an interruption: the ring's position, `mark`, tells whether it has the message."""
        if self.staged is not None and self.staged[1] != mark:
            self.commit()
        self.staged = None

    def frame_for(self, peer: Peer) -> tuple[Piece, Cursor | None] | None:
        """The next frame for `peer`; for a message, its cursor after that, too. None: no frame."""
        if peer.said:
            return (peer.said[0],), None
        sequence, piece = peer.cursor
        if peer.link is not Link.STREAMING or not self.first <= sequence < self.next:
            return None
        message = self._at(sequence)
        is_last = piece + 1 == len(message.pieces)
        return message.pieces[piece], (message.next, 0) if is_last else (sequence, piece + 1)

    def can_resume_at(self, sequence: int, piece: int) -> bool:
        """Returns whether a stream can begin there: at a frame still here, or with the next
        message."""
        if sequence == self.next:
            return piece == 0
        is_here = self.first <= sequence < self.next
        return is_here and piece < len(self._at(sequence).pieces)

    def end_of(self, sequence: int) -> int:
        """Bytes of all messages before `sequence`; within a frame, of those before the frame."""
        if sequence >= self.next or not self._messages:
            return self.bytes
        message = self._at(sequence)
        return message.end - message.size

    def bytes_between(self, begin: Cursor, end: Cursor) -> int:
        """Bytes from one frame to another; 0 if that one does not come later."""
        ahead = self.end_of(end[0]) - self.end_of(begin[0]) + (end[1] - begin[1]) * PIECE
        return max(0, ahead)

    def drop_taken(self) -> None:
        """Drops the messages that every reader has taken."""
        taken = min((p.taken for p in self._peers if p.is_waited_for), default=self.next)
        while self._messages and self._messages[0].next <= taken:
            self._messages.popleft()

    # Windows ----------------------------------------------------------------------------------

    def has_room(self, size: int) -> bool:
        """Returns whether one more message of `size` bytes fits every reader's window."""
        return not any(self._is_in_the_way(peer, size) for peer in self._peers)

    def _is_in_the_way(self, peer: Peer, size: int) -> bool:
        if not peer.is_waited_for:
            return False
        in_flight = self.bytes - peer.taken_bytes
        is_too_much = in_flight > 0 and in_flight + size > self._window_bytes
        return is_too_much or self.next - peer.taken >= self._window

    def full(self, size: int) -> list[Peer]:
        """The readers whose window has no room for `size` more bytes."""
        return [peer for peer in self._peers if self._is_in_the_way(peer, size)]

    def in_the_way(self, size: int, now: float) -> str:
        """The same in words, likeliest cause first."""
        return listed([facts_of(peer, self.next, now) for peer in self.full(size)])

    def room(self) -> tuple[int, int]:
        """Returns how many messages, and bytes in total, fit every window; negative bytes: none."""
        messages, nbytes = self._window, self._window_bytes
        for peer in self._peers:
            if peer.is_waited_for:
                messages = min(messages, self._window - self.next + peer.taken)
                nbytes = min(nbytes, self._window_bytes - self.bytes + peer.taken_bytes)
        return (messages, nbytes) if messages > 0 else (0, -1)
