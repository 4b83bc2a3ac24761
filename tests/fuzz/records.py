"""Inputs as records of 16 bytes, like those of native/tests/fuzz/scribbler.hpp.

The first says what to do, the others what a peer that maps the whole file writes where.
"""

from __future__ import annotations

import mmap
import os
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.fuzz import engine

RECORD = struct.Struct("<HBBIQ")


class Scribble(NamedTuple):
    after: int  # steps of the target
    region: int
    width: int
    offset: int
    value: int


def parse(content: bytes) -> tuple[bytes, list[Scribble]]:
    """Returns the first record as it is, and the others in order."""
    whole = content[: len(content) // RECORD.size * RECORD.size]
    records = [Scribble(*fields) for fields in RECORD.iter_unpack(whole)]
    return content[: RECORD.size].ljust(RECORD.size, b"\0"), records[1:]


class Peer:
    """Writes into the file's regions, given as (offset, bytes)."""

    def __init__(
        self, memory: mmap.mmap, regions: list[tuple[int, int]], scribbles: list[Scribble]
    ):
        self._memory = memory
        self._regions = [*regions, (0, len(memory))]
        self._scribbles = scribbles

    def strike(self, now: int) -> None:
        """Does all writes due at this step."""
        for scribble in self._scribbles:
            if scribble.after % 8 == now:
                self._write(scribble)

    def _write(self, scribble: Scribble) -> None:
        start, length = self._regions[scribble.region % len(self._regions)]
        width = min(1 << scribble.width % 4, length)
        at = start + scribble.offset % (length - width + 1)
        self._memory[at : at + width] = scribble.value.to_bytes(8, "little")[:width]


@contextmanager
def whole(path: Path) -> Iterator[mmap.mmap]:
    """The segment's file, writable, as any process of the same user can map it."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(descriptor, 0) as memory:
            yield memory
    finally:
        os.close(descriptor)


def change(content: bytes, dice: random.Random) -> bytes:
    """Adds, removes or reorders records, or changes numbers in them."""
    head, scribbles = parse(content)
    first = bytearray(head)
    for _ in range(dice.randint(1, 4)):
        match dice.randrange(6):
            case 0:
                first[dice.randrange(4)] = dice.randrange(256)
            case 1 if scribbles:
                del scribbles[dice.randrange(len(scribbles))]
            case 2 if scribbles:
                at = dice.randrange(len(scribbles))
                scribbles[at] = scribbles[at]._replace(
                    offset=dice.randrange(1 << dice.choice([6, 8, 16]))
                )
            case 3 if scribbles:
                at = dice.randrange(len(scribbles))
                scribbles[at] = scribbles[at]._replace(value=_number(dice))
            case _:
                at = dice.randrange(1 << dice.choice([4, 7, 13, 20]))
                at -= at % dice.choice([1, 4, 8])
                new = Scribble(
                    dice.randrange(8), dice.randrange(8), dice.randrange(4), at, _number(dice)
                )
                scribbles.insert(dice.randrange(len(scribbles) + 1), new)
    return bytes(first) + b"".join(RECORD.pack(*scribble) for scribble in scribbles)


def _number(dice: random.Random) -> int:
    if dice.random() < 0.3:
        return dice.getrandbits(64) >> dice.randrange(64)
    return (dice.choice(engine.NUMBERS) + dice.choice([0, 0, -1, 1])) % (1 << 64)
