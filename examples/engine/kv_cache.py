"""The keys and values of running sequences, for the heads that one worker holds."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

FIRST_CAPACITY = 64


class KVCache:
    """One growing buffer per sequence and layer, of shape (2, heads, capacity, head_dim)."""

    def __init__(self, layers: int, heads: int, head_dim: int) -> None:
        """Start with no sequence."""
        self._layers = layers
        self._empty = np.empty((2, heads, 0, head_dim), np.float32)
        self._buffers: dict[int, list[Array]] = {}

    def extend(
        self, sequence: int, layer: int, position: int, keys: Array, values: Array
    ) -> tuple[Array, Array]:
        """Store keys and values, each (heads, rows, head_dim), from `position` on.

        Returns all keys and all values of the sequence so far, without a copy.
        """
        buffers = self._buffers.setdefault(sequence, [self._empty] * self._layers)
        end = position + keys.shape[1]
        if end > buffers[layer].shape[2]:
            buffers[layer] = _grown(buffers[layer], max(end, 2 * position, FIRST_CAPACITY))
        stored = buffers[layer]
        stored[0, :, position:end] = keys
        stored[1, :, position:end] = values
        return stored[0, :, :end], stored[1, :, :end]

    def drop(self, sequence: int) -> None:
        """Forget a finished sequence."""
        del self._buffers[sequence]


def _grown(buffer: Array, capacity: int) -> Array:
    pairs, heads, length, head_dim = buffer.shape
    larger = np.empty((pairs, heads, capacity, head_dim), np.float32)
    larger[:, :, :length] = buffer
    return larger
