"""Fuzzing: bytes of a peer that means harm, for everything that decodes them.

Two engines, each in one file, with the same words on their command lines: `engine.py` for targets
in Python (`targets/`), `native/tests/fuzz/engine.cpp` for those in C++. `__main__.py` runs both.
`seeds/TARGET` holds what each starts with: some genuine inputs, and whatever once was a fault.
"""
