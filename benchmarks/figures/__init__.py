"""The figures of the README and the manual: one module a figure measures, `draw` draws.

What was measured stands as JSON in `benchmarks/results/figures`, with the machine, the date and the
command, so that anyone can draw it again, and check what a picture says.
"""
