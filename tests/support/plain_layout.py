"""Processes that know only the documented byte layout, and import nothing of memlane."""

import mmap
import os
import sys
import time
from pathlib import Path

from tests.support import PATIENCE, Link


class PlainRing:
    """The documented part of a segment, through a plain mapping."""

    def __init__(self, n_reader: int, chunk_bytes: int, chunks: int, name: str) -> None:
        assert "memlane" not in sys.modules
        self.n_reader, self.chunk_bytes, self.chunks = n_reader, chunk_bytes, chunks
        descriptor = os.open(Path("/dev/shm") / name, os.O_RDWR | os.O_NOFOLLOW)
        try:
            self.bytes = mmap.mmap(descriptor, (chunk_bytes + 1 + n_reader) * chunks)
        finally:
            os.close(descriptor)

    def flag(self, chunk: int, reader: int = -1) -> int:
        """Offset of a reader's flag of a chunk, or (without a reader) of ``written``."""
        return self.chunk_bytes * self.chunks + chunk * (1 + self.n_reader) + 1 + reader

    def until(self, flag: int, value: int) -> None:
        """Polls a flag until it has a value."""
        deadline = time.monotonic() + PATIENCE
        while self.bytes[flag] != value:
            assert time.monotonic() < deadline
            time.sleep(0)

    def read(self, chunk: int, reader: int) -> bytes:
        """Reads the chunk as soon as it is published, without releasing it."""
        self.until(self.flag(chunk), 1)
        self.until(self.flag(chunk, reader), 0)
        start = chunk * self.chunk_bytes
        return self.bytes[start : start + self.chunk_bytes]

    def release(self, chunk: int, reader: int) -> None:
        """Marks the chunk as read."""
        assert self.bytes[self.flag(chunk, reader)] == 0
        self.bytes[self.flag(chunk, reader)] = 1

    def write(self, chunk: int, data: bytes) -> None:
        """Writes data to the chunk as soon as it is free, in the documented order."""
        if self.bytes[self.flag(chunk)]:
            for reader in range(self.n_reader):
                self.until(self.flag(chunk, reader), 1)
        self.bytes[self.flag(chunk)] = 0
        start = chunk * self.chunk_bytes
        self.bytes[start : start + len(data)] = data
        for reader in range(self.n_reader):
            self.bytes[self.flag(chunk, reader)] = 0
        self.bytes[self.flag(chunk)] = 1


def read_everything(
    link: Link, geometry: tuple[int, int, int, str], reader: int, count: int
) -> list[bytes]:
    """Role: reader ``reader`` takes ``count`` chunks."""
    ring = PlainRing(*geometry)
    link.tell("attached")
    received = []
    for number in range(count):
        received.append(ring.read(number % ring.chunks, reader))
        ring.release(number % ring.chunks, reader)
    return received


def release_on_cue(
    link: Link, geometry: tuple[int, int, int, str], reader: int, count: int
) -> list[float]:
    """Role: releases one chunk per cue; returns the times."""
    ring = PlainRing(*geometry)
    link.tell("attached")
    moments = []
    for number in range(count):
        link.hear()
        ring.read(number % ring.chunks, reader)
        moments.append(time.monotonic())
        ring.release(number % ring.chunks, reader)
    return moments


def write_everything(link: Link, geometry: tuple[int, int, int, str], data: list[bytes]) -> None:
    """Role: the writer."""
    ring = PlainRing(*geometry)
    link.tell("attached")
    for number, part in enumerate(data):
        ring.write(number % ring.chunks, part)


def write_on_cue(link: Link, geometry: tuple[int, int, int, str], count: int) -> list[float]:
    """Role: writes one chunk per cue; returns the times."""
    ring = PlainRing(*geometry)
    link.tell("attached")
    moments = []
    for number in range(count):
        link.hear()
        moments.append(time.monotonic())
        ring.write(number % ring.chunks, bytes([number]))
    return moments
