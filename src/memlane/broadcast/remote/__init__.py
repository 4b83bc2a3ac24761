"""Readers on other hosts: one writer's messages over TCP, each of them once and in order.

`wire` (bytes), `writer`, `reader`; beside them who may read (`places`), what may be in flight
(`outbox`), and how a connection is seen to live (`tcp`). Imported only by a queue that has remote
readers.
"""
