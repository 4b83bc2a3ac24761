"""Receiving a message in Python, by copy and by view: an object or an error.

A peer has written over chunks, descriptors, extents, frames and streams beforehand.

Of pickle only the framing is tested: its streams are not unpickled, because they could do anything.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memlane import MemlaneError, MessageQueue
from memlane._base import serialization
from tests.fuzz import records
from tests.support.queues import path_of

CHUNK, CHUNKS = 8192, 3
_TRAILER = -(-(CHUNK + 2) * CHUNKS // 4096) * 4096

SENT: list[Any] = [
    {"step": 1, "ids": [1, 2, 3], "x": None, "f": 1.5},
    b"bytes" * 3,
    (1, "tuple"),
    [np.arange(5000, dtype=np.uint8), {"k": 1}],
    [np.zeros(20_000, np.uint8), np.ones(5000, np.uint8), "y" * 300],
    ("large", b"b" * 100_000),
    [list(range(300)), "x" * 200] * 30,
    {str(number): "x" * 250 for number in range(20)},
]


class Framing(serialization.PickleCodec):
    """Takes streams and buffers whole, and reads every byte."""

    @staticmethod
    def decode(stream: bytes) -> Any:  # type: ignore[override]
        return len(stream)

    @staticmethod
    def decode_parts(stream: Any, buffers: Any) -> Any:
        total = 0
        if not isinstance(stream, bytes):
            total += stream.readinto(bytearray(100)) + len(stream.readline()) + len(stream.read(7))
            stream = stream.read(2**62) + stream.read(-1)
        return total + len(stream) + sum(sum(memoryview(buffer)[::4096]) * 0 for buffer in buffers)


serialization.PickleCodec = Framing  # type: ignore[misc]

GENUINE = [
    bytes([sent, read, kind, 0]).ljust(16, b"\0")
    for sent in range(len(SENT))
    for read, kind in ((0, 0), (0xFF, 0), (0, 1))
]
GENUINE += [
    bytes([4, 0xFF, 0, 0]).ljust(16, b"\0") + records.RECORD.pack(1, region, 3, offset, value)
    for region, offset, value in (
        (1, 24, 4096),
        (0, 16, 2**63),
        (0, 24, 4096),
        (0, 32, 0),
        (2, 0, 2),
    )
]
# MessagePack that is nested without end, of an object that is plain, and as the serializer's.
GENUINE += [
    bytes([7, 0, kind, 0]).ljust(16, b"\0")
    + b"".join(
        records.RECORD.pack(1, 4, 3, at, int.from_bytes(b"\x91" * 8)) for at in range(0, 5000, 8)
    )
    for kind in (0, 1)
]
change = records.change


def attempt(content: bytes) -> object:
    (sent, read, kind, *_), scribbles = records.parse(content)
    serializer = "msgpack" if kind & 1 else "pickle"
    writer = MessageQueue(
        1, 1, None, CHUNK, CHUNKS, serializer=serializer, max_extent_bytes=kind << 14
    )
    reader = MessageQueue.create_from_handle(writer.export_handle(0), 0)
    outcomes: list[object] = []
    try:
        for number in (sent, sent >> 4):
            outcomes.append(_try(writer.enqueue, _sendable(SENT[number % len(SENT)], kind), 0))
        with records.whole(path_of(writer)) as memory:
            regions = [
                (_TRAILER + 1024 + 128 * 2 + 128 + 128, 128),  # descriptors
                (_TRAILER, 1024),
                (0, 64),
                (CHUNK, 64),
                (0, CHUNK),
            ]
            peer = records.Peer(memory, regions, scribbles)
            for step in range(4):
                peer.strike(step)
                if step:
                    outcomes.append(_try(_take, reader, read >> step & 1))
            outcomes.append(_try(writer.enqueue, SENT[0], 0))
            outcomes.append(_try(_look, writer))
            outcomes.append(_try(_look, reader))
    finally:
        reader.close()
        writer.close()
    return tuple(outcomes)


def _sendable(value: Any, kind: int) -> Any:
    """The parts of a value that MessagePack has types for."""
    if not kind & 1:
        return value
    return [item.tobytes() if isinstance(item, np.ndarray) else item for item in value]


def _take(reader: MessageQueue, is_view: int) -> object:
    if not is_view:
        return type(reader.dequeue(timeout=0)).__name__
    with reader.dequeue_view(timeout=0) as value:
        return type(value).__name__


def _look(end: MessageQueue) -> None:
    repr(end.statistics())


def _try(call: Any, *arguments: Any) -> object:
    try:
        return call(*arguments)
    except MemlaneError as error:
        return type(error).__name__
