"""The polling ring: our implementation of the ring in vLLM's first `shm_broadcast`.

Chunk c is at c * chunk_bytes. After the chunks come 1 + readers bytes per chunk: `written`, then
one flag per reader. The writer takes a chunk that is not written or that all have read: it sets
`written` to 0, fills the chunk, sets the readers' flags to 0 and `written` to 1. A reader takes the
chunk when `written` is 1 and its own flag 0, and sets its flag to 1 after reading. A process that
has to wait yields the core and polls again. Objects are pickled whole, protocol 5.
"""

from __future__ import annotations

import os
import pickle
from multiprocessing.shared_memory import SharedMemory

from memlane.cli.bench.channel import MIB, SLACK, Channel, Peer, Setting

CHUNK_BYTES = 10 * MIB


class PollingRing(Channel):
    """In pure Python, like the original."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._chunk_bytes = max(CHUNK_BYTES, setting.payload.bytes + SLACK)
        self._flags_bytes = 1 + setting.readers
        self._chunk = 0

    def prepare(self) -> None:
        size = self.setting.chunks * (self._chunk_bytes + self._flags_bytes)
        self._memory = SharedMemory(self.setting.name, create=True, size=size)
        self._memory.unlink()  # the readers inherit the mapping; nothing can leak
        self._bytes = memoryview(self._memory.buf or b"")

    def open_reader(self, rank: int, token: object) -> None:
        self._rank = rank

    def _flags(self) -> memoryview:
        start = self.setting.chunks * self._chunk_bytes + self._chunk * self._flags_bytes
        return self._bytes[start : start + self._flags_bytes]

    def _data(self) -> memoryview:
        start = self._chunk * self._chunk_bytes
        return self._bytes[start : start + self._chunk_bytes]

    def send(self, obj: object) -> None:
        data = pickle.dumps(obj, protocol=5)
        flags = self._flags()
        readers = self.setting.readers
        while flags[0] and sum(flags[1:]) < readers:
            os.sched_yield()
        flags[0] = 0
        self._data()[: len(data)] = data
        for reader in range(1, 1 + readers):
            flags[reader] = 0
        flags[0] = 1
        self._chunk = (self._chunk + 1) % self.setting.chunks

    def recv(self) -> object:
        flags = self._flags()
        own = 1 + self._rank
        while not flags[0] or flags[own]:
            os.sched_yield()
        obj = pickle.loads(self._data())
        flags[own] = 1
        self._chunk = (self._chunk + 1) % self.setting.chunks
        return obj


PEERS = (Peer("polling ring", PollingRing, sleeps=False),)
