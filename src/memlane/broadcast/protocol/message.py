"""Messages from the network: assembles their pieces and decodes their objects."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

from memlane._native import blank_bytes, pooled
from memlane.broadcast.protocol.frames import Header, Kind
from memlane.errors import CorruptMessage

if TYPE_CHECKING:
    from memlane._base.serialization import Codec
    from memlane._native import Buffer

_ALIGNMENT = 64  # as in native/broadcast/frames.hpp
_HEAD = struct.Struct("<QQ")


class Message(NamedTuple):
    """A whole message, not decoded; `memory` is private and the reader's own."""

    sequence: int
    kind: int
    memory: bytes | memoryview


class Assembly:
    """A message with pieces still missing."""

    def __init__(self, first: Header) -> None:
        self.first = first
        self._whole: bytes | memoryview
        if first.kind == Kind.BYTES:
            self._whole, self._memory = blank_bytes(first.total)
        else:
            self._whole = self._memory = memoryview(pooled(first.total))  # type: ignore[arg-type]

    def add(self, header: Header, payload: memoryview) -> Message | None:
        """Adds a piece; returns the complete message with the last one."""
        first, end = self.first, header.offset + len(payload)
        same = (first.kind, first.pieces, first.total) == (header.kind, header.pieces, header.total)
        if not same or end > first.total:
            raise CorruptMessage(
                f"piece {header.piece} of message {header.sequence} does not fit: bytes "
                f"{header.offset} to {end} of {first.total}"
            )
        self._memory[header.offset : end] = payload
        if header.piece + 1 < header.pieces:
            return None
        return Message(header.sequence, header.kind, self._whole)


def decode(message: Message, codec: Codec) -> Any:
    """The object of a message. Arrays lie in the message's own memory."""
    memory = message.memory
    match message.kind:
        case Kind.PLAIN:
            try:
                return codec.decode_plain(bytes(memory))
            except ValueError:  # no object becomes such bytes
                raise CorruptMessage(_BROKEN) from None
        case Kind.BYTES:
            return bytes(memory)
        case Kind.OBJECT:
            return codec.decode(memory)  # type: ignore[arg-type]
        case Kind.FRAMES:
            own = bytearray(memory) if isinstance(memory, bytes) else memory  # arrays are writable
            stream, buffers = split(memoryview(own))
            return codec.decode_parts(stream, buffers)
        case _:
            raise CorruptMessage(
                "the chunk was filled with acquire_write, which sends nothing to other hosts"
            )


_BROKEN = "the message is not a memlane message (was it filled with acquire_write?); skipped"


def split(memory: memoryview) -> tuple[bytes, list[Buffer]]:
    """Splits a message into its stream and the buffers beside it, as `FrameTable` lays them out."""
    if len(memory) < _HEAD.size:
        raise CorruptMessage(_BROKEN)
    count, stream_bytes = _HEAD.unpack_from(memory)
    table_end = _HEAD.size + 8 * count
    if count == 0 or table_end > len(memory):
        raise CorruptMessage(_BROKEN)
    sizes = struct.unpack_from(f"<{count}Q", memory, _HEAD.size)
    at = _aligned(table_end)
    stream = bytes(memory[at : at + stream_bytes])
    at += stream_bytes
    buffers: list[Any] = []
    for size in sizes:
        at = _aligned(at)
        buffers.append(memory[at : at + size])
        at += size
    if at != len(memory):
        raise CorruptMessage(_BROKEN)
    return stream, buffers


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
