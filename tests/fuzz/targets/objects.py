"""The object store from Python, after a peer has written over ring, table, directory and slots.

Get, view, put, eviction, statistics, readers that attach and leave, the ring alone: each gives a
value or an error of memlane's.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from memlane import (
    MemlaneError,
    MsgpackSerde,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
)
from tests.fuzz import records
from tests.support.queues import SHM

SIZE, MOST = 8192, 3000
_HEADER = 8192
_TABLE = 12288

VALUES: list[Any] = [
    {"a": [1, 2.5, "x"], "b": b"bytes"},
    np.arange(300, dtype=np.uint16),
    [np.zeros(4), "y" * 100, (1, 2)],
    b"b" * 1500,
]

_Place = tuple[int, int]

GENUINE = [bytes([step, 0, 0, 0]).ljust(16, b"\0") for step in range(16)]
GENUINE += [
    head + records.RECORD.pack(after, region, 3, offset, value)
    for head in (bytes([0xFF, 3, 0, 0]).ljust(16, b"\0"), bytes([0, 1, 0, 0]).ljust(16, b"\0"))
    for after, region, offset, value in (
        (0, 0, 4, 2**31 - 1),
        (1, 1, 8, 2**63),
        (1, 1, 16, 2**32),
        (0, 2, 0, 5),
        (2, 3, 68, 2**32 - 1),
    )
]


def attempt(content: bytes) -> object:
    head, scribbles = records.parse(content)
    ring = SingleWriterShmRingBuffer(SIZE, create=True)
    writer = SingleWriterShmObjectStorage(MOST, 2, ring, MsgpackSerde, max_objects=8)
    ends = [writer]
    outcomes: list[object] = []
    try:
        reader = SingleWriterShmObjectStorage.create_from_handle(writer.handle())
        ends.append(reader)
        places = [writer.put(number, VALUES[number]) for number in range(3)]
        with records.whole(SHM / ring.handle()[1]) as memory:
            entries = len(memory) - 4096
            regions = [
                (0, 64),
                (_TABLE, len(memory) - _TABLE),
                (entries, 512),
                (_HEADER, 512),
                (_TABLE, 128),
            ]
            peer = records.Peer(memory, regions, scribbles)
            for step in range(8):
                peer.strike(step)
                how = head[step % 4] >> step & 1 | (head[1] & 2)
                outcomes += _step(step, how, ends, places, int.from_bytes(head[4:8], "little"))
    finally:
        for end in reversed(ends):
            end.close()
    return tuple(outcomes)


def _step(
    step: int, how: int, ends: list[SingleWriterShmObjectStorage], places: list[_Place], odd: int
) -> list[object]:
    writer, reader = ends[0], ends[1]
    match step:
        case 0 | 1:
            return [
                _try(_view if how else reader.get, *place, *[reader] * (how > 0))
                for place in places
            ]
        case 2:
            return [_try(reader.get, address, odd) for address in (odd, places[0][0], -odd)]
        case 3:
            return [
                _try(writer.get, *places[0]),
                _try(_access, writer.ring_buffer, odd),
                _try(_access, reader.ring_buffer, 0),
            ]
        case 4:
            return [
                _try(writer.get_cached, 1),
                _try(writer.put, 3 + how, VALUES[3]),
                _try(writer.free_unused),
            ]
        case 5:
            reader.close()
            return [
                _try(_join, ends, writer),
                _try(_look, ends[-1]),
                _try(ends[-1].get, *places[1]),
            ]
        case 6:
            return [_try(writer.put, 10 + number, VALUES[3]) for number in range(4)]
        case _:
            return [
                _try(writer.clear) if how else None,
                _try(writer.put, 20, VALUES[0]),
                _try(_look, writer),
            ]


def _view(address: int, number: int, reader: SingleWriterShmObjectStorage) -> str:
    with reader.view(address, number) as value:
        if isinstance(value, np.ndarray):
            value.tobytes()
        return type(value).__name__


def _access(ring: SingleWriterShmRingBuffer, address: int) -> int:
    with ring.access_buf(address) as (view, (number, size)):
        assert len(view) == size - 8
        return len(bytes(view)) and number


def _join(ends: list[SingleWriterShmObjectStorage], writer: SingleWriterShmObjectStorage) -> None:
    ends.append(SingleWriterShmObjectStorage.create_from_handle(writer.handle()))


def _look(end: SingleWriterShmObjectStorage) -> None:
    repr(end.statistics())


def _try(call: Any, *arguments: Any) -> object:
    try:
        result = call(*arguments)
    except MemlaneError as error:
        return type(error).__name__
    return type(result).__name__


change = records.change
