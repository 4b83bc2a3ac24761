"""The offload region, measured against what one would write instead.

startup     of a region: `python -m benchmarks.offload.startup`
moving      blocks between two arrays: `python -m benchmarks.offload.moving`
floor.cpp   what the machine itself can copy, on one thread and on two
"""
