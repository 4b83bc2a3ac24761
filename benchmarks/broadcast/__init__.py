"""Broadcast, compared with its alternatives: `python -m benchmarks.broadcast`.

payloads   what is sent
peers      the libraries and designs that are compared, each behind the same small interface
worker     the processes of one peer: its writer and its readers
board      the time stamps of these processes
plan       which payloads with how many readers, and how many messages
measure    what a peer does in one turn
floor      what the machine itself needs for a wake-up, a round trip, a copy, a pickle
bars       the promises, checked against the figures of the same run
shown      what the tables and the picture show

The store's benchmarks share what is one level up: command line, sessions, turns, results, reports,
plots.
"""
