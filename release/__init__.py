"""What a release consists of, and whether strangers can install it.

Runs before memlane is installed, on the standard library alone.
"""
