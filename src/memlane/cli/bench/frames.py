"""Objects as a pickle and out-of-band buffers, for peers that carry only bytes.

Layout: the number of sizes that follow, the sizes of the pickle and the buffers (64-bit words),
then the pickle and the buffers; each buffer begins at the next multiple of 64.
"""

from __future__ import annotations

import pickle
import struct
from typing import NamedTuple

_ALIGN = 64


class Frames(NamedTuple):
    """An encoded object; the buffers alias it."""

    head: bytes
    buffers: list[memoryview]

    @property
    def room(self) -> int:
        """An upper bound of the bytes that `write` touches."""
        sizes = (len(self.head), *map(len, self.buffers))
        return 8 * (1 + len(sizes)) + sum(size + _ALIGN for size in sizes)


def encode(obj: object) -> Frames:
    """Pickles with protocol 5; buffers are passed out of band."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return Frames(head, [buffer.raw() for buffer in buffers])


def write(memory: memoryview, frames: Frames) -> None:
    """Writes into `memory`, with one copy."""
    pieces: list[bytes | memoryview] = [frames.head, *frames.buffers]
    struct.pack_into(f"={1 + len(pieces)}Q", memory, 0, len(pieces), *map(len, pieces))
    at = 8 * (1 + len(pieces))
    for piece in pieces:
        memory[at : at + len(piece)] = piece
        at = -(-(at + len(piece)) // _ALIGN) * _ALIGN


def read(memory: memoryview, copy: bool) -> object:
    """Decodes the object: with one copy, or as an alias of `memory`."""
    (count,) = struct.unpack_from("=Q", memory)
    at, pieces = 8 * (1 + count), []
    for size in struct.unpack_from(f"={count}Q", memory, 8):
        pieces.append(memory[at : at + size])
        at = -(-(at + size) // _ALIGN) * _ALIGN
    head, *buffers = pieces
    return pickle.loads(head, buffers=map(bytearray, buffers) if copy else buffers)
