"""Images in requests: random pixels, in realistic sizes.

To the model an image is `TOKENS` tokens in front of the prompt, one for each patch of a grid. In
the text they are placeholders; their embeddings are made from the pixels (`Shard.see`).
"""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]
"""(3, height, width); both are multiples of `UNIT`."""

GRID = 4
TOKENS = GRID * GRID
PLACEHOLDERS = bytes(TOKENS)

UNIT = 28
SIDES = (336, 448, 672, 896, 1008)
MAX_BYTES = 3 * max(SIDES) ** 2
"""Bytes of the largest image's pixels: 2.9 MiB."""

SEED = 28


class Image(NamedTuple):
    """An image in a request."""

    key: str
    """The same for the same content, in every request."""
    pixels: Pixels


def image_of(pixels: Pixels) -> Image:
    """Return the image of these pixels, with a key that is a hash of them and their shape."""
    content = hashlib.blake2b(str(pixels.shape).encode(), digest_size=16)
    content.update(pixels.data)
    return Image(content.hexdigest(), pixels)


def draw_images() -> Iterator[Image]:
    """Yield images endlessly, of all sizes in turn, the same ones in every process."""
    random = np.random.default_rng(SEED)
    while True:
        for side in SIDES:
            yield image_of(random.integers(0, 256, (3, side, side), np.uint8))
