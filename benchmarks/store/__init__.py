"""The object store, compared with its alternatives: `python -m benchmarks.store`.

payloads   what is stored, and how its readers check it
channel    the interface that every peer is measured through
peers      the stores that are compared; one is the floor: memcpy, to memlane's addresses
worker     the processes of one peer: its writer and its readers
measure    what a peer does in one turn
bars       the promises, checked against the figures of the same run
shown      what the tables and the picture show
"""
