"""One writer and one reader over TCP on the loopback: memlane and bare pyzmq, in one run.

`python -m benchmarks.remote` prints, for each kind of channel in turn, the one-way time of a small
dict without other traffic, and the throughput for messages of 256 B to 64 MiB. Bare pyzmq is PUSH
and PULL with whole messages, without windows or acknowledgements, which is what one would write
first. Both are measured with CURVE and in plaintext (memlane: msgpack).
"""
