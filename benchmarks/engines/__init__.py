"""A real vLLM on two CPU cores, with its own classes and with memlane's, in turns.

`python -m benchmarks.engines` sets up vLLM 0.32.0 in `build/engines` (about 860 MB, once) and
prints a table. The model is tiny and random, because only its surroundings are measured.
"""
