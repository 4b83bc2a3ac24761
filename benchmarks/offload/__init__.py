"""The offload region, compared with what one would write instead.

startup     starting a region: `python -m benchmarks.offload.startup`
moving      moving blocks between two arrays: `python -m benchmarks.offload.moving`
floor.cpp   how fast the machine itself can copy, with one thread and with two
"""
