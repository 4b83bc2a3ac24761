"""A block is on a disk, and found there by the next tier that opens the folder."""

import tempfile

import numpy as np

from memlane.tiers import DiskTier

rows = np.zeros((8, 65536), np.uint8)  # or a region's rows: one block a row
with tempfile.TemporaryDirectory() as folder:
    with DiskTier(folder, rows, "16MiB", namespace="llama-3-8b, rev 2") as tier:
        rows[3] = 7
        tier.store([b"a digest"], [3])
        tier.drain()  # for the example; a program polls
        print([done.ok.tolist() for done in tier.poll()])  # [[True]]
    with DiskTier(folder, rows, "16MiB", namespace="llama-3-8b, rev 2") as tier:
        with tier.hold([b"a digest", b"another"]) as held:  # not evicted before the load
            print(held.there)  # [True, False]
            tier.load([b"a digest"], [5])
        tier.drain()
        print([done.ok.tolist() for done in tier.poll()], rows[5, 0])  # [[True]] 7
