"""The offload region, measured against what one would write instead.

moving      blocks between two arrays: `python -m benchmarks.offload.moving`
floor.cpp   what the machine itself can copy, on one thread and on two
"""
