"""The keys and values of sequences on the device, for the heads that one worker holds."""

import numpy as np
import numpy.typing as npt

from .paging import BLOCK_SIZE, blocks_of

Array = npt.NDArray[np.float32]


class KVCache:
    """A pool of blocks. Callers pass the table that lists a sequence's blocks."""

    def __init__(self, blocks: int, layers: int, heads: int, head_dim: int) -> None:
        """Allocate memory for that many blocks."""
        self.blocks: Array = np.empty((blocks, layers, 2, heads, BLOCK_SIZE, head_dim), np.float32)
        """The first axis counts the blocks; a block is contiguous and contains all layers."""

    def extend(
        self, table: list[int], layer: int, position: int, keys: Array, values: Array
    ) -> tuple[Array, Array]:
        """Store keys and values, each (heads, rows, head_dim), from `position` on.

        Returns all keys and all values of the sequence so far, gathered from its blocks. Their
        layout does not depend on where the blocks are, so later arithmetic is bit-identical.
        """
        at, end = position, position + keys.shape[1]
        while at < end:
            within = slice(at % BLOCK_SIZE, min(BLOCK_SIZE, at % BLOCK_SIZE + end - at))
            count = within.stop - within.start
            rows = slice(at - position, at - position + count)
            block = self.blocks[table[at // BLOCK_SIZE], layer]
            block[0, :, within] = keys[:, rows]
            block[1, :, within] = values[:, rows]
            at += count
        parts = [self.blocks[block, layer] for block in table[: blocks_of(end)]]
        gathered = np.concatenate(parts, axis=2)  # the one copy
        return gathered[0, :, :end], gathered[1, :, :end]
