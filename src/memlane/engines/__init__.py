"""Adapters: engines that carry a queue of their own run on memlane's, without a patch.

Nothing here is imported by memlane itself; each engine has a folder, and its own switch.
"""
