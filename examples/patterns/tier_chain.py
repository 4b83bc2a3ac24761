"""A pool of 16 rows, and a disk for what it evicts."""

import tempfile

import numpy as np

from memlane.tiers import BlockPool, DiskTier, TierChain

keys = [number.to_bytes(32, "big") for number in range(40)]  # digests, as a rule
rows = np.zeros((16, 65536), np.uint8)  # or memoryview(region.create_kv_memoryview())
pool = BlockPool(16, "lru")
with (
    tempfile.TemporaryDirectory() as folder,
    DiskTier(folder, rows, "16MiB", policy="lru") as disk,
    TierChain(pool, rows, [disk], spare=4) as chain,
):
    for number, key in enumerate(keys):
        with pool.reserve([key]) as new:  # evicts, from the thirteenth on
            for _, row in new:
                rows[row] = number
            new.commit()
        disk.drain()  # for the example: nobody has to wait
    with chain.fetch(keys[:4], timeout=5.0) as pin:
        print(rows[pin.ids, 0], pin.missing)  # [0 1 2 3] []
    print(chain.statistics().loaded, chain.statistics().dropped)  # 4 0
