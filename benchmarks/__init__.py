"""The measurements in docs/benchmarks.md, each with the command that repeats it."""
