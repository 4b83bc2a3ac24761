"""One writer and one reader over TCP on the loopback: memlane beside bare pyzmq, in one run.

`python -m benchmarks.remote` prints, for each kind of channel in turn, how long a small dict takes
one way while nothing else flows, and how many bytes in messages of 256 B to 64 MiB get through.
Bare pyzmq is PUSH and PULL, whole messages: it knows of no windows, acknowledges nothing, and is
what one would write first. Both with CURVE, and both in plaintext (memlane: msgpack).
"""
