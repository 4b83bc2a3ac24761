"""The floor: memcpy and nothing else, in the same kind of memory, to and from the same addresses.

The ring is one of memlane's, of the same size; the bytes of each array lie where the storage would
put them. What is copied from is the same kind of object, and what is copied to is memory that was
used before. Where an array goes is found out before the time is taken.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from benchmarks.store.channel import Channel, Peer
from benchmarks.store.payloads import arrays
from benchmarks.store.peers.memlane_store import ring_bytes
from memlane import MsgpackSerde, SingleWriterShmRingBuffer, StoreFull

ALIGNMENT = 64
PREAMBLE = 12  # of a chunk's header and its read count
memmove = ctypes.memmove


class Memcpy(Channel):
    has_view = False

    def open_writer(self) -> object:
        size = ring_bytes(self.setting)
        self._ring = SingleWriterShmRingBuffer(size, create=True)
        obj = self.setting.payload.make()
        _, nbytes, _, metadata_bytes = MsgpackSerde().serialize(obj)
        self._gap = PREAMBLE + metadata_bytes
        self._total = -(-(self._gap + nbytes) // ALIGNMENT) * ALIGNMENT
        self._base()
        self.settle()
        return self._ring.handle()

    def open_reader(self, rank: int, token: Any) -> None:
        self._ring = SingleWriterShmRingBuffer(*token)
        self._own = self.setting.payload.make()
        self._to = [array.ctypes.data for array in arrays(self._own)]
        self._base()

    def _base(self) -> None:
        self._memory = np.frombuffer(self._ring.shared_memory.buf, np.uint8)
        self._at = self._memory.ctypes.data
        self._sources: dict[int, list[tuple[int, int, int]]] = {}

    def settle(self) -> None:
        """Finds the next place."""
        ring = self._ring
        while True:
            try:
                address, _ = ring.allocate_buf(self._total - ring.MD_SIZE)
            except StoreFull:
                ring.free_buf(lambda *_: True, 1)
            else:
                break
        self._next = address % ring.data_buffer_size

    def _copies(self, obj: Any) -> list[tuple[int, int, int]]:
        """(from, bytes, offset behind the first array) of every array, once looked at."""
        found = self._sources.get(id(obj))
        if found is None:
            found, offset = [], 0
            for array in arrays(obj):
                found.append((array.ctypes.data, array.nbytes, offset))
                offset += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
            self._sources[id(obj)] = found
        return found

    def put(self, obj: Any) -> Any:
        start = self._next + self._gap
        to = self._at + start
        for source, nbytes, offset in self._copies(obj):
            memmove(to + offset, source, nbytes)
        return start

    def get(self, place: Any) -> Any:
        start = self._at + place
        for to, nbytes, offset in self._copies(self._own):
            memmove(to, start + offset, nbytes)
        return self._own

    def close(self) -> None:
        del self._memory
        self._ring.close()


PEERS = (Peer("memcpy", Memcpy, is_floor=True),)
