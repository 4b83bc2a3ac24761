"""Moving blocks to and from a GPU: `make gpu`, or `python -m benchmarks.gpu`.

plan        what is measured, in what order, and what is dropped when time is short
ways        the ways to move blocks, memlane's and others
kernel.cu   one of them; compiled.py compiles and launches it
device      the GPU
measure     what takes time
shown       JSON, Markdown and bars
"""
