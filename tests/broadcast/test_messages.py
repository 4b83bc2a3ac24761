"""enqueue and dequeue: every reader gets every message unchanged, in order, once."""

import collections
import dataclasses
import datetime
import itertools
import os
import pickle
from typing import Any

import numpy as np
import pytest

from memlane import MessageQueue
from tests.support.queues import queue_of

pytestmark = [pytest.mark.wheel, pytest.mark.unit]


@dataclasses.dataclass
class Step:
    """A message such as an engine sends."""

    number: int
    tokens: list[int]
    blocks: dict[str, "np.ndarray[Any, Any]"]


OBJECTS: list[Any] = [
    None,
    True,
    0,
    -(2**100),
    1.5,
    "",
    "text with \0 and \ud800",
    b"",
    bytes(range(256)) * 100,
    bytearray(b"mutable") * 20_000,
    (),
    [[], {}, (1, [2, (3,)])],
    {1: "a", (2, 3): {4, 5}, "k": frozenset([6])},
    datetime.datetime(2024, 2, 29, tzinfo=datetime.UTC),
    collections.OrderedDict(b=1, a=2),
    Step(1, [1, 2, 3], {}),
    len,
    Step,
    [b"x" * 70_000, "y" * 70_000, b"x" * 70_000],
    bytes(900_000),
]

ARRAYS: list["np.ndarray[Any, Any]"] = [
    np.arange(10),
    np.arange(100_000, dtype=np.float32).reshape(100, 10, 100),
    np.asfortranarray(np.arange(40_000).reshape(200, 200)),
    np.arange(100_000)[::3],
    np.arange(40_000).reshape(200, 200)[:, 50:60],
    np.array(5.0),
    np.empty((0, 7)),
    np.zeros(30_000, dtype=">i4") + 5,
    np.array([(1, 2.5, "a")] * 9_000, dtype=[("i", "i8"), ("f", "f4"), ("s", "U3")]),
    np.array([{"an": "object"}, None, "x"], dtype=object),
    np.array(["2024-02-29"] * 20_000, dtype="M8[D]"),
    np.ma.masked_greater(np.arange(20_000), 100),
]


@pytest.mark.parametrize("message", OBJECTS, ids=lambda message: repr(message)[:30])
def test_any_picklable_object_arrives_as_it_was(message: Any) -> None:
    """Any picklable object arrives equal and of its type at every reader."""
    with queue_of(2, max_chunk_bytes=1 << 20) as (writer, readers):
        writer.enqueue(message)
        for reader in readers:
            again = reader.dequeue()
            assert type(again) is type(message)
            assert again == message


class Tagged(bytes):
    """Bytes of a type of their own."""


@pytest.mark.parametrize("serializer", ["pickle", "msgpack"])
def test_bytes_travel_as_they_are(serializer: str) -> None:
    """At any size, with both serializers, without any framing."""
    sizes = [0, 1, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 300_000]
    with (
        MessageQueue(1, 1, max_chunk_bytes=4096, serializer=serializer) as writer,
        MessageQueue.create_from_handle(writer.export_handle(0), 0) as reader,
    ):
        for size in sizes:
            writer.enqueue(message := os.urandom(size))
            again = reader.dequeue(timeout=0)
            assert type(again) is bytes
            assert again == message
        assert writer.statistics().bytes == sum(sizes)


def test_bytes_of_another_type_stay_so() -> None:
    """Only exact bytes objects take the short cut."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(Tagged(b"x"))
        assert type(reader.dequeue()) is Tagged


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}"[:30])
def test_arrays_of_any_kind_arrive_writable(array: "np.ndarray[Any, Any]") -> None:
    """Arrays of any kind and layout arrive equal, writable, and each reader's own."""
    with queue_of(2, max_chunk_bytes=1 << 20) as (writer, readers):
        writer.enqueue({"array": array, "again": array})
        messages = [reader.dequeue() for reader in readers]
        for message in messages:
            again = message["array"]
            assert again is message["again"]
            assert type(again) is type(array)
            assert (again.dtype, again.shape) == (array.dtype, array.shape)
            assert np.array_equal(again, array)
            assert again.flags.writeable
        assert not np.shares_memory(messages[0]["array"], messages[1]["array"])


def test_several_large_parts_keep_their_order() -> None:
    """Many buffers in one message keep their order."""
    message = [np.full(n, n % 251, np.uint8) for n in (0, 1, 7, 8, 9, 70_000, 3, 100_000)] * 2
    with queue_of(max_chunk_bytes=1 << 20) as (writer, (reader,)):
        writer.enqueue((message, b"\1" * 100_000, pickle.PickleBuffer(b"\2" * 80_000)))
        arrays, inband, out_of_band = reader.dequeue()
        assert all(np.array_equal(a, b) for a, b in zip(arrays, message, strict=True))
        assert inband == b"\1" * 100_000
        assert bytes(out_of_band) == b"\2" * 80_000


def test_read_only_arrays_arrive_equal() -> None:
    """An array that its sender may not write can be sent."""
    array = np.arange(50_000)
    array.flags.writeable = False
    with queue_of(max_chunk_bytes=1 << 20) as (writer, (reader,)):
        writer.enqueue(array)
        assert np.array_equal(reader.dequeue(), array)


def test_what_was_read_is_the_readers_own() -> None:
    """A message does not change when its chunk is reused, nor the other way round."""
    with queue_of(2, max_chunk_bytes=1 << 20, max_chunks=2) as (writer, readers):
        writer.enqueue([np.full(100_000, 1, np.uint8), b"\1" * 100_000, bytearray(b"\1" * 10)])
        kept = readers[0].dequeue()
        kept[0][:10] = 9
        kept[2][:] = b"\7" * 10
        untouched = readers[1].dequeue()
        assert untouched[0].min() == untouched[0].max() == 1
        assert untouched[2] == b"\1" * 10
        for value in range(2, 8):
            writer.enqueue(np.full(250_000, value, np.uint8))
            for reader in readers:
                reader.dequeue()
        assert kept[0][:10].tolist() == [9] * 10
        assert set(kept[0][10:].tolist()) == {1}
        assert kept[1] == b"\1" * 100_000


def test_the_caller_may_change_what_it_sent() -> None:
    """M20: readers see the value of the time of enqueue."""
    array, data, items = np.zeros(100_000, np.uint8), bytearray(100_000), [0]
    with queue_of(max_chunk_bytes=1 << 20) as (writer, (reader,)):
        writer.enqueue((array, data, items))
        array[:] = 1
        data[:] = b"\1" * 100_000
        items[0] = 1
        array_then, data_then, items_then = reader.dequeue()
        assert not array_then.any()
        assert not any(data_then)
        assert items_then == [0]


@pytest.mark.parametrize("chunks", [1, 2, 3, 10])
def test_thousands_of_messages_arrive_in_order(chunks: int) -> None:
    """Thousands of messages through a few chunks arrive once, in order, at every reader."""
    with queue_of(3, max_chunks=chunks, max_chunk_bytes=256) as (writer, readers):
        numbers = itertools.count()
        for _ in range(2000 // chunks):
            sent = [next(numbers) for _ in range(chunks)]
            for number in sent:
                writer.enqueue(number, timeout=0)
            for reader in readers:
                assert [reader.dequeue(timeout=0) for _ in sent] == sent


def test_messages_of_every_size_up_to_the_chunk_arrive() -> None:
    """Every size that fits arrives whole, to the last byte."""
    with queue_of(max_chunk_bytes=1024) as (writer, (reader,)):
        for size in range(800):
            message = bytes([size % 251]) * size
            writer.enqueue(message)
            assert reader.dequeue() == message


def test_recursive_objects_arrive() -> None:
    """An object that contains itself arrives so."""
    message: list[Any] = [1]
    message.append(message)
    with queue_of() as (writer, (reader,)):
        writer.enqueue(message)
        again = reader.dequeue()
        assert again[0] == 1
        assert again[1] is again
