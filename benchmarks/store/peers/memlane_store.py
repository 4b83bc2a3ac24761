"""memlane's object storage, created as a user would."""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from typing import Any

from benchmarks.store.channel import Channel, Peer, Setting
from memlane import SingleWriterShmObjectStorage, SingleWriterShmRingBuffer

# Room in the ring for an object's data other than its arrays.
SLACK = 4096


def ring_bytes(setting: Setting) -> int:
    payload = setting.payload
    return payload.slots * (payload.bytes + SLACK)


class Storage(Channel):
    def open_writer(self) -> object:
        ring = SingleWriterShmRingBuffer(ring_bytes(self.setting), create=True)
        most = self.setting.payload.bytes + SLACK
        self._storage = SingleWriterShmObjectStorage(most, self.setting.readers, ring)
        self._keys = itertools.count()
        return self._storage.handle()

    def open_reader(self, rank: int, token: Any) -> None:
        self._storage = SingleWriterShmObjectStorage.create_from_handle(token)

    def put(self, obj: Any) -> Any:
        return self._storage.put(next(self._keys), obj)

    def get(self, place: Any) -> Any:
        return self._storage.get(*place)

    def view(self, place: Any) -> AbstractContextManager[Any]:
        return self._storage.view(*place)

    def close(self) -> None:
        self._storage.close()


PEERS = (Peer("memlane", Storage, is_memlane=True),)
