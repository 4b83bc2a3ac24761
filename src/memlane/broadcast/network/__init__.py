"""Readers on other hosts: all I/O of a queue over TCP.

`writer` and `reader` are the two ends; `shared_reader` is a reader whose host shares one stream
through `relay`. An end has a session of `protocol`, which decides, a `transport` (ZeroMQ), and a
`driver` (calls, thread, waiting). A writer also has `sending`, what it may send and has begun; a
reader `incoming`, its frames, and `ahead`, its messages that are decoded before they are asked for.
`awaited` shows by a descriptor whether a call would wait. Imported only by a queue that has remote
readers.
"""
