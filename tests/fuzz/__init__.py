"""Fuzzing: hostile bytes for everything that decodes a peer's.

Two engines, each in one file, with the same command line: `engine.py` for targets in Python
(`targets/`), `native/tests/fuzz/engine.cpp` for those in C++. `__main__.py` runs both.
`seeds/TARGET` holds what each starts with: some valid inputs, and every one that was a fault.
"""
