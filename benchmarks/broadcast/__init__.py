"""Broadcast, measured against what a user would take instead: `python -m benchmarks.broadcast`.

payloads   what is sent
peers      who carries it, each behind the same small interface
session    one peer with its readers, in processes of their own, from outside; worker: from inside
board      where the processes leave their time stamps
plan       which payloads with how many readers, and how many messages
measure    the peers in turns, several times, in rotating order
floor      what the machine itself needs for a wake-up, a round trip, a copy, a pickle
bars       the promises, checked against the figures of the same run
report     table and JSON; plot: SVG
"""
