"""A peer keeps changing a length, an offset or a state while another process decodes.

A value that is read twice may be two values. Fails without the guard: a number that is checked in
shared memory, and then used from there.
"""

import itertools
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from memlane import MemlaneError, MessageQueue, MsgpackSerde, ShmObjectStorageHandle
from memlane.store import _wire
from tests.broadcast.test_scribbling import limit_memory
from tests.fuzz.records import whole
from tests.support import Link, start
from tests.support.queues import SHM, path_of
from tests.support.stores import Place, Storage, store_of

TRIES = 300
CHUNK = 8192
FAR = [0, 1, 63, 4096, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 64, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


class Field(NamedTuple):
    """Some bytes of a segment's file, and their original value."""

    offset: int
    width: int
    genuine: int


@contextmanager
def attacked(path: Path, field: Field) -> Iterator[None]:
    """In the block somebody writes to the field, what is right half of the time."""
    attacker = start(overwrite, path, field)
    attacker.hear()
    try:
        yield
    finally:
        attacker.kill()
        with whole(path) as memory:
            write(memory, field, field.genuine)


def overwrite(link: Link, path: Path, field: Field) -> None:
    with whole(path) as memory:
        link.tell()
        for number in itertools.cycle([n for n in FAR if n < 1 << 8 * field.width]):
            write(memory, field, number)
            write(memory, field, field.genuine)


def write(memory: Any, field: Field, number: int) -> None:
    memory[field.offset : field.offset + field.width] = number.to_bytes(field.width, "little")


# The queue ----------------------------------------------------------------------------------------

SMALL = {"step": 1, "ids": [1, 2, 3]}
LARGE = ["x" * 100] * 300
ARRAYS = [np.arange(600, dtype=np.int64), "between", np.arange(100, 612, dtype=np.int64)]
MANY = [np.arange(5000, dtype=np.int64), "between", np.arange(100, 4000, dtype=np.int64)]

DESCRIPTOR = -(-(CHUNK + 2) // 4096) * 4096 + 1024 + 2 * 128 + 128 + 128
"""Behind the only chunk and its flags: header, two slots, the futex words, one parked byte."""
# What is sent, how, and where in the file the field lies.
OF_QUEUE: dict[str, tuple[Any, str, int]] = {
    "length": (SMALL, "pickle", DESCRIPTOR + 16),
    "length of frames": (ARRAYS, "pickle", DESCRIPTOR + 16),
    "length of an extent": (LARGE, "msgpack", DESCRIPTOR + 16),
    "offset of an extent": (LARGE, "msgpack", DESCRIPTOR + 24),
    "offset of an extent with frames": (MANY, "pickle", DESCRIPTOR + 24),
    "bytes of an extent": (MANY, "pickle", DESCRIPTOR + 32),
    "lap": (ARRAYS, "pickle", DESCRIPTOR + 0),
    "number of frames": (ARRAYS, "pickle", 0),
    "bytes of the stream": (ARRAYS, "pickle", 8),
    "bytes of a frame": (ARRAYS, "pickle", 16),
    "bytes of another frame": (ARRAYS, "pickle", 24),
}


def take(reader: MessageQueue, is_view: bool) -> Any:
    if not is_view:
        return reader.dequeue(timeout=0)
    with reader.dequeue_view(timeout=0) as value:
        return [item.copy() if isinstance(item, np.ndarray) else item for item in value]


def is_same(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def decode_meanwhile(_link: Link, what: str) -> int:
    sent, serializer, at = OF_QUEUE[what]
    received = 0
    with (
        MessageQueue(1, 1, None, CHUNK, 1, serializer=serializer, max_extent_bytes=0) as writer,
        MessageQueue.create_from_handle(writer.export_handle(0), 0) as reader,
    ):
        limit_memory()
        writer.enqueue(sent)
        with whole(path_of(writer)) as memory:
            field = Field(at, 8, struct.unpack_from("<Q", memory, at)[0])
        reader.dequeue()
        with attacked(path_of(writer), field):
            for number in range(TRIES):
                try:
                    writer.enqueue(sent, timeout=0)
                    value = take(reader, is_view=number % 3 == 0 and sent is not SMALL)
                except MemlaneError:
                    continue
                assert is_same(value, sent), value
                received += 1
        for _ in range(2):  # the first may have been under way
            writer.enqueue(sent, timeout=0)
            value = reader.dequeue(timeout=0)
        assert is_same(value, sent)
    return received


@pytest.mark.parametrize("what", OF_QUEUE)
def test_a_scribbled_message_is_right_or_an_error(what: str) -> None:
    """The right bytes or an error of memlane's, and afterwards the queue still works."""
    start(decode_meanwhile, what).result()


# The store ----------------------------------------------------------------------------------------

OBJECT: dict[str, Any] = {
    "array": np.arange(700, dtype=np.int64),
    "tree": [1, "text", (2.5, None)],
    "b": b"b" * 20,
}
SIZE = 1 << 15
TABLE = SIZE + 4096 + 128 + 2 * 128
"""The offset in a ring of that size, with one reader: header, facts, slots."""


def in_entry(offset: int, width: int = 8) -> Callable[[Place], tuple[int, int]]:
    return lambda place: (TABLE + 128 * (place[1] % 8) + offset, width)


def in_chunk(offset: int, width: int) -> Callable[[Place], tuple[int, int]]:
    return lambda place: (place[0] + offset, width)


OF_STORE: dict[str, Callable[[Place], tuple[int, int]]] = {
    "stamp": in_entry(0),
    "address": in_entry(8),
    "size": in_entry(16),
    "references": in_entry(24, 4),
    "reads": in_entry(64 + 8, 4),
    "pins": in_entry(64 + 12, 4),
    "pins of the writer": in_entry(64 + 4, 4),
    "id in the chunk": in_chunk(0, 4),
    "size in the chunk": in_chunk(4, 4),
    "length of the tree": in_chunk(_wire.PREAMBLE + 4, 8),
    "first byte of the tree": in_chunk(_wire.PREAMBLE + 12, 1),
}


def is_object(value: Any) -> bool:
    return (
        list(value) == list(OBJECT)
        and np.array_equal(value["array"], OBJECT["array"])
        and (value["tree"] == OBJECT["tree"] and value["b"] == OBJECT["b"])
    )


def read_meanwhile(link: Link, handle: ShmObjectStorageHandle) -> int:
    received = 0
    with Storage.create_from_handle(handle) as reader:
        limit_memory()
        link.tell()
        place = link.hear()
        for number in range(TRIES):
            try:
                if number % 3:
                    value = reader.get(*place)
                else:
                    with reader.view(*place) as lying:
                        value = {**lying, "array": lying["array"].copy(), "b": bytes(lying["b"])}
                    del lying
            except MemlaneError:
                continue
            assert is_object(value), value
            received += 1
        repr(reader.statistics())
    return received


@pytest.mark.parametrize("what", OF_STORE)
def test_a_scribbled_object_is_right_or_an_error(what: str) -> None:
    """The reader gets the right bytes or an error of memlane's; the writer continues."""
    with store_of(1, SIZE, 1 << 13, MsgpackSerde, attached=0, max_objects=8) as (writer, _):
        path = SHM / writer.ring_buffer.handle()[1]
        victim = start(read_meanwhile, writer.handle())
        victim.hear()
        places = [writer.put(key, OBJECT) for key in range(3)]
        offset, width = OF_STORE[what](places[1])
        with whole(path) as memory:
            genuine = int.from_bytes(memory[offset : offset + width], "little")
        with attacked(path, Field(offset, width, genuine)):
            victim.tell(places[1])
            for key in itertools.count(10):
                if victim.has_spoken():
                    break
                try:
                    writer.put(key, OBJECT)
                    writer.get(*places[1])
                    writer.free_unused()
                    repr(writer.statistics())
                except MemlaneError:
                    pass
        victim.result()
