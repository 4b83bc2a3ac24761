"""The object store, measured against what a user would take instead: `python -m benchmarks.store`.

payloads   what is stored, and how its readers check it
channel    the interface that every peer is measured through
peers      who stores it; one of them is the floor: memcpy, to the addresses that memlane uses
worker     one peer with its readers, in processes of their own, from inside
measure    what a turn of a peer is
bars       the promises, checked against the figures of the same run
shown      what is in its tables and its picture
"""
