"""A small inference engine on memlane: one scheduler, N tensor-parallel workers, no GPU needed.

Run it with `PYTHONPATH=examples python -m engine`. What it shows is data movement; the model is
random numbers. Every step goes like this:

    scheduler                                     workers (each holds its heads and MLP columns)
      decide what runs, and in which blocks
      put new images into the store
      broadcast the decision  ───────────────────▶  take it, move blocks of the KV cache from and to
                                                    the offload region, look at images in the store,
                                                    embed the tokens
      per layer: add up       ◀── partial sums ───  compute the shard's part of the layer
                 broadcast the total ────────────▶  add it to the hidden state
      elect the next tokens   ◀── votes ──────────  best token of the shard's vocabulary

The decision, a dict of a few hundred bytes for all workers, is what memlane's broadcast is made
for. Images, up to 3 MB each and the same ones again and again, are what its object store is made
for: the decision only says where they are. The KV cache of a worker is a pool of blocks, a small
one: sequences take turns, and the blocks of those who are paused are in memlane's offload region.
The partial sums and totals stand in for the all-reduce that GPUs do among themselves.

Read `worker.py`, `crew.py` and `scheduler.py` for memlane's broadcast, `image_store.py` for its
object store, `offload.py` for its offload region, `batching.py` and `paging.py` for what is
decided, `model.py` and `kv_cache.py` for the transformer, `trace.py` for requests as a real service
got them, `live.py` for who does what meanwhile, which the `statistics` of queue and store tell, and
`ending.py` for how a program that holds shared memory and processes ends on a signal.
Scheduler and workers do not know who is on which host: `local.py` starts workers on this one,
`remote.py` on several, and `hosts.py` shows that on two (`python -m engine.hosts`, as root).
"""

import os

# One BLAS thread per process: the workers are the parallelism. It has to be said before the first
# import of numpy; spawned workers inherit it.
for _library in ("OPENBLAS", "OMP", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"
