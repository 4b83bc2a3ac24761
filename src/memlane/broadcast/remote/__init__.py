"""Readers on other hosts: delivers one writer's messages over TCP, each once and in order.

`frames` defines the bytes, `writer_session` and `reader_session` the protocol (without I/O);
`writer` and `reader` add sockets and threads. `keys` and `admission` decide who may read, `outbox`
what may be in flight, `watch` whether a reader's writer is alive. Imported only by a queue that has
remote readers.
"""
