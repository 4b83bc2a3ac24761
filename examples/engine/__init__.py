"""A small inference engine on memlane: one scheduler, N tensor-parallel workers, no GPU needed.

Run it with `PYTHONPATH=examples python -m engine`. It demonstrates data movement; the
model is a tiny one, which has learned memlane's manual (`train.py`). Each step:

    scheduler                                     workers (each holds its heads and MLP columns)
      decide which sequences run, in which blocks
      put new images into the store
      broadcast the decision  ───────────────────▶  dequeue it, move KV-cache blocks from and to
                                                    the offload region, view images in the store,
                                                    embed the tokens
      per layer: add up       ◀── partial sums ───  compute the shard's part of the layer
                 broadcast the total ────────────▶  add it to the hidden state
      elect the next tokens   ◀── votes ──────────  best token of the shard's vocabulary

memlane's broadcast carries the decision, a dict of a few hundred bytes, to all workers. Images, up
to 3 MB each and often repeated, are in its object store; the decision only says where. Each
worker's KV cache is a small pool of blocks: sequences take turns, and the blocks of paused
sequences are in memlane's offload region, or, where that is full, in a tier behind it: a file on
disk, a Redis server, a bucket. Requests that begin alike find each other's blocks there. The
partial sums and totals stand in for the all-reduce among GPUs.

Read `worker.py`, `crew.py` and `scheduler.py` for memlane's broadcast, `image_store.py` for its
object store, `offload.py` for its offload region and `backing.py` for the tier behind it,
`batching.py` and `paging.py` for scheduling, `model.py` and `kv_cache.py` for the transformer,
`trace.py` for request traces of real services, `live.py` for a live view made from the `statistics`
of queue and store, and `ending.py` for how a program that holds shared memory and processes shuts
down on a signal.
Scheduler and workers do not know which host a process is on: `local.py` starts workers on this
host, `remote.py` on several, and `hosts.py` runs two (`python -m engine.hosts`, as root).
"""

import os

# One BLAS thread per process: the workers are the parallelism. Must be set before numpy is first
# imported; spawned workers inherit it.
for _library in ("OPENBLAS", "OMP", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"
