"""Messages that were sent and may be needed again: until everybody has taken them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import zmq

from memlane.broadcast.remote.wire import (
    HEADER_BYTES,
    PIECE,
    SMALL,
    Header,
    Kind,
    What,
    whole_header,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from memlane._native import Encoder


Part = tuple[int, bytes | memoryview]
"""Some bytes of a message, and where in it they are."""
Piece = bytes | zmq.Frame
"""A header and its payload."""

_BLANK = memoryview(bytes(HEADER_BYTES + PIECE))


class Message(NamedTuple):
    """One message as it travels; its memory is private, and shared by all its readers."""

    sequence: int
    size: int
    end: int  # bytes of all messages up to and with this one
    pieces: Sequence[Piece]


def pieces_of(encoder: Encoder, epoch: int, sequence: int, total: int) -> list[Piece]:
    """Copies what the encoder refers to, once, into memory that sending does not copy again."""
    kind = encoder.kind
    if total <= SMALL:
        return [encoder.joined(whole_header(epoch, sequence, kind, total))]
    cut = [
        (offset + at, memoryview(part)[at : at + PIECE])
        for offset, part in _joined(encoder.parts())
        for at in range(0, len(part), PIECE)
    ]
    pieces: list[Piece] = []
    for offset, payload in cut:
        header = Header(
            What.MESSAGE, epoch, sequence, kind, len(pieces), len(cut), offset, total
        ).pack()
        # Memory of libzmq, which pyzmq only makes as a copy of something, and then to be filled.
        frame = zmq.Frame(_BLANK[: HEADER_BYTES + len(payload)], copy=True)
        memory = memoryview(frame.buffer)
        memory[:HEADER_BYTES] = header
        memory[HEADER_BYTES:] = payload
        pieces.append(frame)
    return pieces


def raw_piece(epoch: int, sequence: int) -> list[Piece]:
    """A message that says no more than that there was one."""
    return [whole_header(epoch, sequence, Kind.RAW, 0)]


def _joined(parts: Iterable[Part]) -> Iterator[Part]:
    """The same, but short neighbours (a table, a stream) as one, with the padding between them."""
    begin, joined = 0, bytearray()
    for offset, part in parts:
        if len(part) <= SMALL:
            if not joined:
                begin = offset
            joined += bytes(offset - begin - len(joined))
            joined += part
            continue
        if joined:
            yield begin, bytes(joined)
            joined = bytearray()
        yield offset, part
    if joined:
        yield begin, bytes(joined)


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
        self.bytes += size
        message = Message(self.next, size, self.bytes, pieces)
        self._messages.append(message)
        self.next += 1
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
