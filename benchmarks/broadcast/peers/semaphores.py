"""A ring in shared memory, with two semaphores per reader: free chunks and filled chunks."""

from __future__ import annotations

from multiprocessing.shared_memory import SharedMemory

from memlane.cli.bench import frames
from memlane.cli.bench.channel import SLACK, Channel, Peer, Setting
from memlane.cli.bench.processes import FORK


class SemaphoreRing(Channel):
    """A ring as a careful user writes it in an afternoon: out-of-band buffers, one copy on each
    side."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._chunk_bytes = setting.payload.bytes + SLACK
        self._chunk = 0

    def prepare(self) -> None:
        size = self.setting.chunks * self._chunk_bytes
        self._memory = SharedMemory(self.setting.name, create=True, size=size)
        self._memory.unlink()  # the readers inherit the mapping; nothing can leak
        self._bytes = memoryview(self._memory.buf or b"")
        readers = range(self.setting.readers)
        self._free = [FORK.Semaphore(self.setting.chunks) for _ in readers]
        self._filled = [FORK.Semaphore(0) for _ in readers]

    def open_reader(self, rank: int, token: object) -> None:
        self._rank = rank

    def _take(self) -> memoryview:
        start = self._chunk * self._chunk_bytes
        self._chunk = (self._chunk + 1) % self.setting.chunks
        return self._bytes[start : start + self._chunk_bytes]

    def send(self, obj: object) -> None:
        encoded = frames.encode(obj)
        for free in self._free:
            free.acquire()
        frames.write(self._take(), encoded)
        for filled in self._filled:
            filled.release()

    def recv(self) -> object:
        self._filled[self._rank].acquire()
        obj = frames.read(self._take(), copy=True)
        self._free[self._rank].release()
        return obj


PEERS = (Peer("semaphore ring", SemaphoreRing),)
