"""The keys and values of sequences on the device, for the heads that one worker holds."""

import numpy as np
import numpy.typing as npt

from .paging import BLOCK_SIZE, blocks_of

Array = npt.NDArray[np.float32]


class KVCache:
    """A pool of blocks. Which of them a sequence has is not known here: its table comes along."""

    def __init__(self, blocks: int, layers: int, heads: int, head_dim: int) -> None:
        """Take memory for so many blocks."""
        self.blocks: Array = np.empty((blocks, layers, 2, heads, BLOCK_SIZE, head_dim), np.float32)
        """On the first axis the blocks; a block is contiguous, all layers in it."""

    def extend(
        self, table: list[int], layer: int, position: int, keys: Array, values: Array
    ) -> tuple[Array, Array]:
        """Store keys and values, each (heads, rows, head_dim), from `position` on.

        Returns all keys and all values of the sequence so far, gathered from its blocks. They are
        laid out in the same way wherever the blocks lie, so the arithmetic that follows is the
        same to the last bit.
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
