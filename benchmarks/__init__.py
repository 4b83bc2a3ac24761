"""The measurements shown in docs/benchmarks.md, each with the command that repeats it."""
