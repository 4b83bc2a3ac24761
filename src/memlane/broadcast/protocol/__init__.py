"""The protocol between a writer and its readers on other hosts, without I/O.

`frames` and `message` define the bytes; `writer_session` and `reader_session` decide what to send
and who lives, given frames, events and the time. `peer`, `places` and `outbox` are what the writer
knows of its readers, `admission` decides who may read, `replies` makes what they are answered,
`readiness` tells them who is absent, `connection_state` whether a reader's writer lives. Nothing
here knows sockets, threads or clocks.
"""
