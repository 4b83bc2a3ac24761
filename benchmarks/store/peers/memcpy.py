"""The floor: only memcpy, in the same kind of memory, to and from the same addresses.

The ring is one of memlane's, of the same size, and each array is placed where the storage would
place it. Sources are the same kind of object, and destinations are memory that was used before.
Places are determined outside the measured time.
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
PREAMBLE = 12  # a chunk's header and its read count
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
        """Determines the next place."""
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
        """(address, bytes, offset from the first array) of every array, cached per object."""
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
