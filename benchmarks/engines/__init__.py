"""A real vLLM on two CPU cores, on its own classes and on memlane's, in turns.

`python -m benchmarks.engines` sets up vLLM 0.32.0 in `build/engines` (about 860 MB, once) and
prints a table. The model is tiny and random: what is measured is what surrounds it.
"""
