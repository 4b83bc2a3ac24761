"""Readers on other hosts: all I/O of a queue over TCP.

`writer` and `reader` are the two ends; `shared_reader` is a reader whose host shares one stream
through `relay`. An end has a session of `protocol`, which decides, a `transport` (ZeroMQ), and a
`driver` (calls, thread, waiting). Imported only by a queue that has remote readers.
"""
