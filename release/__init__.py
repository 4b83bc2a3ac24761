"""Builds a release, and tries whether strangers can install it.

Runs before memlane is installed, on the standard library alone.
"""
