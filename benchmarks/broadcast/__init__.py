"""Broadcast, measured against what a user would take instead: `python -m benchmarks.broadcast`.

payloads   what is sent
peers      who carries it, each behind the same small interface
worker     one peer with its readers, in processes of their own, from inside
board      where the processes leave their time stamps
plan       which payloads with how many readers, and how many messages
measure    what a turn of a peer is
floor      what the machine itself needs for a wake-up, a round trip, a copy, a pickle
bars       the promises, checked against the figures of the same run
shown      what is in its tables and its picture

What the store's benchmarks need, too, is one level up: command line, sessions, turns, results,
reports, plots.
"""
