"""memlane's MessageQueue, by copy and by view, created as a user would."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import cast

from memlane import Handle, MessageQueue
from memlane.cli.bench.channel import MIB, SLACK, Channel, Peer, only_arrays

_CHUNK_BYTES = 10 * MIB  # the default


class Copy(Channel):
    """`dequeue`: the object belongs to the reader."""

    def open_writer(self) -> object:
        readers, payload = self.setting.readers, self.setting.payload
        chunk_bytes = max(_CHUNK_BYTES, payload.bytes + SLACK)
        if payload.is_tensor:  # these are stored in extents
            chunk_bytes = _CHUNK_BYTES
        self.queue = MessageQueue(
            readers, readers, max_chunk_bytes=chunk_bytes, max_chunks=self.setting.chunks
        )
        return self.queue.export_handle()

    def open_reader(self, rank: int, token: object) -> None:
        self.queue = MessageQueue.create_from_handle(cast(Handle, token), rank)

    def ready(self) -> None:
        self.queue.wait_until_ready(timeout=30.0)

    def send(self, obj: object) -> None:
        self.queue.enqueue(obj)

    def recv(self) -> object:
        return self.queue.dequeue()

    def close(self) -> None:
        self.queue.close()


class View(Copy):
    """`dequeue_view`: arrays alias the ring until `release`."""

    _block: AbstractContextManager[object]

    def recv(self) -> object:
        self._block = self.queue.dequeue_view()
        return self._block.__enter__()

    def release(self) -> None:
        self._block.__exit__(None, None, None)


PEERS = (
    Peer("memlane", Copy, is_memlane=True),
    Peer("memlane view", View, refuses=only_arrays, is_view=True, is_memlane=True),
)
