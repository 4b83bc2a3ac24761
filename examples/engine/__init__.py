"""A small inference engine on memlane: one scheduler, N tensor-parallel workers, no GPU needed.

Run it with `PYTHONPATH=examples python -m engine`. What it shows is data movement; the model is
random numbers. Every step goes like this:

    scheduler                                     workers (each holds its heads and MLP columns)
      decide what runs
      broadcast the decision  ───────────────────▶  take it, embed its tokens
      per layer: add up       ◀── partial sums ───  compute the shard's part of the layer
                 broadcast the total ────────────▶  add it to the hidden state
      elect the next tokens   ◀── votes ──────────  best token of the shard's vocabulary

The decision, a dict of a few hundred bytes for all workers, is what memlane's broadcast is made
for. The partial sums and totals stand in for the all-reduce that GPUs do among themselves.

Read `worker.py` and `scheduler.py` for memlane, `batching.py` for what is decided, `model.py` and
`kv_cache.py` for the transformer, `trace.py` for requests as a real service got them, and `live.py`
for who does what meanwhile, which `MessageQueue.statistics` tells.
"""

import os

# One BLAS thread per process: the workers are the parallelism. It has to be said before the first
# import of numpy; spawned workers inherit it.
for _library in ("OPENBLAS", "OMP", "MKL"):
    os.environ[f"{_library}_NUM_THREADS"] = "1"
