"""Readers on other hosts: one writer's messages over TCP, each of them once and in order.

`frames` (bytes), `writer_session` and `reader_session` (the protocol, without I/O), `writer` and
`reader` (their sockets and threads); beside them who may read (`keys`, `admission`), what may be in
flight (`outbox`), and how a connection is seen to live (`tcp`). Imported only by a queue that has
remote readers.
"""
