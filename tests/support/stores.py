"""Storages for tests, in this process and in others."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from memlane import (
    ObjectSerde,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
)
from tests.support import PATIENCE, Link, Remote, serve, start

Ring = SingleWriterShmRingBuffer
Storage = SingleWriterShmObjectStorage
Place = tuple[int, int]

# An object begins 12 bytes after a multiple of 64: 8 bytes of header, 4 of read count.
_METADATA_BYTES = 116


class ArraySerde(ObjectSerde):
    """bytes and numpy arrays, unchanged."""

    def serialize(self, value: Any) -> Any:
        array = value if isinstance(value, np.ndarray) else np.frombuffer(value, np.uint8)
        what = {"dtype": array.dtype.str, "shape": array.shape, "array": array is value}
        metadata = json.dumps(what).encode().ljust(_METADATA_BYTES)
        return [np.ascontiguousarray(array).data], array.nbytes, metadata, len(metadata)

    def deserialize(self, data: memoryview) -> Any:
        what = json.loads(bytes(data[:_METADATA_BYTES]))
        array = np.frombuffer(bytes(data[_METADATA_BYTES:]), what["dtype"]).reshape(what["shape"])
        return array.copy() if what["array"] else array.tobytes()

    def deserialize_view(self, data: memoryview) -> Any:
        what = json.loads(bytes(data[:_METADATA_BYTES]))
        part = data[_METADATA_BYTES:]
        if not what["array"]:
            return part
        return np.frombuffer(part, what["dtype"]).reshape(what["shape"])


class BytesSerde(ObjectSerde):
    """bytes only: an object takes 12 more in the ring, and padding to 64."""

    def serialize(self, value: Any) -> Any:
        return value, len(value), b"", 0

    def deserialize(self, data: memoryview) -> Any:
        return bytes(data)

    def deserialize_view(self, data: memoryview) -> Any:
        return data


class Paced(BytesSerde):
    """Decodes the first half, waits for a cue through `link`, decodes the second half."""

    link: Link | None = None
    patience = PATIENCE

    def deserialize(self, data: memoryview) -> Any:
        half = len(data) // 2
        first = bytes(data[:half])
        if self.link is not None:
            self.link.tell("halfway")
            self.link.hear(self.patience)
        return first + bytes(data[half:])


@contextmanager
def ring_of_bytes(size: int) -> Iterator[Ring]:
    """A byte ring used alone, until the end of the block."""
    ring = Ring(size, create=True)
    try:
        yield ring
    finally:
        ring.close()


@contextmanager
def store_of(
    n_readers: int = 1,
    size: int = 1 << 16,
    max_object_size: int = 1 << 14,
    serde: type[ObjectSerde] = BytesSerde,
    attached: int | None = None,
    **options: Any,
) -> Iterator[tuple[Storage, list[Storage]]]:
    """A writer and `attached` readers (all of them by default), in this process."""
    writer = Storage(max_object_size, n_readers, Ring(size, create=True), serde, **options)
    ends = [writer]
    try:
        for _ in range(n_readers if attached is None else attached):
            ends.append(Storage.create_from_handle(writer.handle()))
        yield writer, ends[1:]
    finally:
        for end in reversed(ends):
            end.close()


def fill(writer: Storage, value: bytes, prefix: str = "") -> list[Place]:
    """Puts the value under new keys until the storage is full."""
    places: list[Place] = []
    while True:
        try:
            places.append(writer.put(f"{prefix}{len(places)}", value))
        except MemoryError:
            return places


def reading(link: Link, handle: ShmObjectStorageHandle) -> None:
    """Role: a reader that makes the requested calls."""
    with Storage.create_from_handle(handle) as reader:
        serve(link, reader)


def start_store_reader(writer: Storage, method: str = "fork") -> Remote:
    """An attached reader in its own process."""
    return Remote(start(reading, writer.handle(), method=method))


def is_evicted(writer: Storage) -> bool:
    """Returns whether the oldest object could be evicted now."""
    writer.free_unused()
    return not writer.is_cached("k")
