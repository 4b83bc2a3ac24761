"""Objects as a pickle and out-of-band buffers, for peers that carry only bytes.

Layout: the number of sizes that follow, the sizes of the pickle and the buffers (64-bit words),
then the pickle and the buffers; each buffer begins at the next multiple of 64.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from dataclasses import dataclass

ALIGN = 64


@dataclass(frozen=True)
class Frames:
    """An encoded object; the buffers alias it."""

    head: bytes
    buffers: Sequence[memoryview]

    @property
    def room(self) -> int:
        """An upper bound of the bytes that `write` touches."""
        sizes = (len(self.head), *map(len, self.buffers))
        return 8 * (1 + len(sizes)) + sum(size + ALIGN for size in sizes)


def encode(obj: object) -> Frames:
    """Pickles with protocol 5; buffers are passed out of band."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(obj, protocol=5, buffer_callback=buffers.append)
    return Frames(head, [buffer.raw() for buffer in buffers])


def write(memory: memoryview, frames: Frames) -> None:
    """Writes into `memory`, with one copy."""
    sizes = (len(frames.head), *map(len, frames.buffers))
    struct.pack_into(f"={1 + len(sizes)}Q", memory, 0, len(sizes), *sizes)
    at = 8 * (1 + len(sizes))
    pieces: list[bytes | memoryview] = [frames.head, *frames.buffers]
    for piece in pieces:
        memory[at : at + len(piece)] = piece
        at = -(-(at + len(piece)) // ALIGN) * ALIGN


def read(memory: memoryview, copy: bool) -> object:
    """Decodes the object: with one copy, or as an alias of `memory`."""
    (count,) = struct.unpack_from("=Q", memory)
    sizes = struct.unpack_from(f"={count}Q", memory, 8)
    pieces = []
    at = 8 * (1 + count)
    for size in sizes:
        pieces.append(memory[at : at + size])
        at = -(-(at + size) // ALIGN) * ALIGN
    head, *buffers = pieces
    if not copy:
        return pickle.loads(head, buffers=buffers)
    return pickle.loads(head, buffers=map(bytearray, buffers))
