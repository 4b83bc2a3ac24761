"""A camera writes its frames straight into shared memory."""

import numpy as np

from memlane.testing import local_queue

SHAPE = (480, 640, 3)
SIZE = int(np.prod(SHAPE))

with local_queue(n_reader=1, max_chunk_bytes=SIZE, mode="latest") as (camera, (viewer,)):
    with camera.acquire_write(timeout=0) as chunk:
        pixels = np.frombuffer(chunk, np.uint8, SIZE).reshape(SHAPE)
        pixels[...] = 127  # the driver writes here
        del pixels  # a reference that outlives the block raises ViewInUse
    with viewer.acquire_read(timeout=1) as chunk:
        pixels = np.frombuffer(chunk, np.uint8, SIZE).reshape(SHAPE)
        print(f"mean {pixels.mean():.0f}")
        del pixels
