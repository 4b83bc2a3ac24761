"""The format of a stored block, and the rows that blocks come from and go to.

A block is stored as a header of 16 bytes, whose CRC-32C is of the key's digest and the row, and the
row. It is loaded into memory of the worker, checked, and copied into its row unless its call is
over by then.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from memlane import _native
from memlane.tiers.remote.requests import LATE, Batch, Call
from memlane.tiers.remote.transport import Refusal
from memlane.tiers.tier import CHANGED, Rows

HEADER = struct.Struct("<4sIII")  # magic, bytes of the row, CRC, reserved
MAGIC = b"MLT1"
_BATCH_BYTES = 4 << 20
_MOST_BLOCKS = 32  # of a batch


class Blocks:
    """The rows of a tier.

    Attributes:
        batch: how many blocks one worker moves at once.
        row_bytes: bytes of a row.
    """

    def __init__(
        self,
        rows: Any,
        shape: Rows,
        crc_of_key: Callable[[bytes], int],
        mismatch: Literal[False] | str,
    ) -> None:
        """Args:
        crc_of_key: returns what the CRC of a block begins with, for a digest.
        mismatch: the outcome of a block that is not what was stored.
        """
        self.row_bytes = shape.nbytes
        self.batch = max(1, min(_MOST_BLOCKS, _BATCH_BYTES // self.row_bytes))
        self._memory = memoryview(rows).cast("B")
        self._crc_of_key = crc_of_key
        self._mismatch = mismatch

    def staging(self) -> bytearray:
        """Returns memory for the batches of one worker."""
        return bytearray(self.batch * (HEADER.size + self.row_bytes))

    def release(self) -> None:
        """Gives the rows back. Nobody may use them any more."""
        self._memory.release()

    def values(self, call: Call, batch: Batch) -> list[tuple[bytes, memoryview]]:
        """Returns the header and the row of each block of a store."""
        made = []
        for place, digest in zip(batch.places, batch.digests, strict=True):
            at = int(call.rows[place]) * self.row_bytes
            row = self._memory[at : at + self.row_bytes]
            crc = _native.crc32c(row, self._crc_of_key(digest))
            made.append((HEADER.pack(MAGIC, self.row_bytes, crc, 0), row))
        return made

    def into(self, batch: Batch, staging: bytearray) -> list[memoryview]:
        """Returns memory for each value of a load."""
        size, memory = HEADER.size + self.row_bytes, memoryview(staging)
        return [memory[at * size : (at + 1) * size] for at in range(len(batch.places))]

    def place(
        self,
        call: Call,
        batch: Batch,
        into: Sequence[memoryview],
        found: Sequence[int | Refusal],
    ) -> list[bool | str]:
        """Copies what was found into the rows, if it is what was stored. Returns the outcomes."""
        outcomes: list[bool | str] = [
            str(got) if isinstance(got, str) else False if got < 0 else self._mismatch
            for got in found
        ]
        size = HEADER.size + self.row_bytes
        whole = [at for at, got in enumerate(found) if got == size]
        with call.lock:
            # The dispatcher may be late itself: then the caller may have the rows already.
            if call.is_over or time.monotonic() >= call.deadline:
                right: list[bool | str] = [LATE] * len(whole)
            else:
                right = [
                    is_right or self._mismatch
                    for is_right in _native.place_blocks(
                        [into[at] for at in whole],
                        [self._crc_of_key(batch.digests[at]) for at in whole],
                        self._memory,
                        self.row_bytes,
                        [int(call.rows[batch.places[at]]) for at in whole],
                    )
                ]
        for at, outcome in zip(whole, right, strict=True):
            outcomes[at] = outcome
        return outcomes


def changed(outcomes: Sequence[bool | str]) -> list[int]:
    """Returns the places of blocks that are not what was stored."""
    return [at for at, outcome in enumerate(outcomes) if outcome == CHANGED]
