"""Reads a ring without memlane: plain_reader.py N_READER CHUNK_BYTES CHUNKS NAME READER COUNT."""

import mmap
import os
import struct
import sys
import time

DESCRIPTORS = 4  # the section that says what memlane's writer put into each chunk
BYTES = 4  # the kind of an unchanged bytes object


class PlainReader:
    def __init__(self, n_reader: int, chunk_bytes: int, chunks: int, name: str, reader: int):
        self.n_reader, self.chunk_bytes, self.chunks = n_reader, chunk_bytes, chunks
        self.reader, self.position = reader, 0
        self.file = os.open(f"/dev/shm/{name}", os.O_RDWR | os.O_NOFOLLOW)
        self.memory = mmap.mmap(self.file, os.fstat(self.file).st_size)
        documented = (chunk_bytes + 1 + n_reader) * chunks
        self.header = -(-documented // 4096) * 4096
        magic, major = struct.unpack_from("<8sI", self.memory, self.header)
        (features,) = struct.unpack_from("<Q", self.memory, self.header + 48)
        geometry = struct.unpack_from("<3Q", self.memory, self.header + 72)
        is_known = (magic, major, features) == (b"MEMLANE1", 5, 0)
        if not is_known or geometry != (n_reader, chunk_bytes, chunks):
            raise ValueError(f"{name} is not such a ring: {magic!r}, layout {major}, {geometry}")
        (count,) = struct.unpack_from("<I", self.memory, self.header + 68)
        for number in range(count):
            at = self.header + 256 + 32 * number
            kind, _, offset = struct.unpack_from("<IIQ", self.memory, at)
            if kind == DESCRIPTORS:
                self.descriptors = offset

    def read(self) -> bytes:
        chunk = self.position % self.chunks
        written = self.chunk_bytes * self.chunks + chunk * (1 + self.n_reader)
        own = written + 1 + self.reader
        while self.memory[own] != 0 or self.memory[written] != 1:  # our own flag first
            time.sleep(0.001)
        data = self._data(chunk)
        self.memory[own] = 1
        self.position += 1
        return data

    def _data(self, chunk: int) -> bytes:
        lap, kind, _, length, extent, extent_bytes = struct.unpack_from(
            "<QIIQQQ", self.memory, self.descriptors + 64 * chunk
        )
        if lap != self.position // self.chunks + 1 or kind != BYTES:
            return self.memory[chunk * self.chunk_bytes : (chunk + 1) * self.chunk_bytes]
        if extent_bytes:
            return os.pread(self.file, length, extent)
        return self.memory[chunk * self.chunk_bytes : chunk * self.chunk_bytes + length]


n_reader, chunk_bytes, chunks, reader, count = map(int, sys.argv[1:4] + sys.argv[5:])
ring = PlainReader(n_reader, chunk_bytes, chunks, sys.argv[4], reader)
for _ in range(count):
    print(ring.read().rstrip(b"\0"), flush=True)
