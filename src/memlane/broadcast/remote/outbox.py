"""Messages that were sent and may be needed again: until everybody has taken them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from memlane.broadcast.remote.sockets import LAST, MORE, send
from memlane.broadcast.remote.wire import (
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
    from memlane.broadcast.remote.sockets import AnySocket


class Piece(NamedTuple):
    """What is sent at once: a header and what it announces."""

    head: bytes  # with the payload behind it, if that is small
    payload: memoryview | None = None  # of memory that nobody changes any more

    def send(self, socket: AnySocket) -> None:
        """The rest of a frame whose route was sent."""
        if self.payload is None:
            send(socket, self.head, LAST)
        else:
            send(socket, self.head, MORE)
            send(socket, self.payload, LAST, False)


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
    """The messages from the oldest that somebody has not taken, to the newest."""

    def __init__(self) -> None:
        self._messages: deque[Message] = deque()
        self.next = 0  # sequence of the message that comes next
        self.bytes = 0  # of all messages that there ever were

    @property
    def first(self) -> int:
        """The oldest that is still here."""
        return self.next - len(self._messages)

    def add(self, size: int, pieces: Sequence[Piece]) -> Message:
        message = Message(self.next, size, self.bytes + size, pieces)
        # A signal handler may raise behind a call only: so both of this happen, or nothing does.
        self.next, self.bytes = message.sequence + 1, message.end
        self._messages.append(message)
        return message

    def end_of(self, sequence: int) -> int:
        """Bytes of all messages before `sequence`."""
        if sequence >= self.next or not self._messages:
            return self.bytes
        message = self._messages[sequence - self.first]
        return message.end - message.size

    def since(self, sequence: int) -> list[Message]:
        skipped = sequence - self.first
        return [message for i, message in enumerate(self._messages) if i >= skipped]

    def drop_before(self, sequence: int) -> None:
        while self._messages and self.first < sequence:
            self._messages.popleft()
