"""Arrays: every dtype and shape comes back unchanged, in memory of the reader's own."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from memlane import MessageQueue
from tests.support.queues import queue_of

pytestmark = pytest.mark.unit

DTYPES = [
    *["?", "i1", "u2", "i4", "u8", "f2", "f4", "f8", "c8", "c16", ">f4", ">i8"],
    *["M8[s]", "m8[ms]", "S5", "U7", "V3", "O"],
    [("a", "i4"), ("b", ">f8"), ("c", "u1", (3,))],
]
SHAPES = [(), (0,), (0, 3), (5,), (40, 40), (300, 70, 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chunk", [4096, 1 << 20])
def test_every_dtype_and_shape_arrives(dtype: object, chunk: int) -> None:
    """0-dim, empty and large ones, in a chunk and in an extent."""
    with queue_of(max_chunk_bytes=chunk) as (writer, (reader,)):
        for shape in SHAPES:
            raw = np.random.default_rng(0).integers(65, 90, 8 * int(np.prod(shape)) or 8, np.uint8)
            array = np.zeros(shape, dtype)  # type: ignore[call-overload]
            if array.dtype.kind in "iuf" and array.size:
                array[...] = raw[: array.size].reshape(shape)
            writer.enqueue(array)
            got = reader.dequeue()
            assert (got.dtype, got.shape) == (array.dtype, array.shape)
            assert got.flags.writeable
            assert got.tobytes() == array.tobytes() or dtype == "O"
            writer.enqueue(array)
            with reader.dequeue_view() as view:
                assert (view.dtype, view.shape) == (array.dtype, array.shape)
                assert view.tobytes() == array.tobytes() or dtype == "O"
            del view


@pytest.mark.parametrize("size", [12, 60_000])
def test_subclasses_of_arrays_keep_their_type(size: int) -> None:
    """Subclasses of arrays come back as their own type."""
    base = np.arange(size).reshape(3, -1)
    kinds = [
        np.ma.masked_array(base, base % 2 == 0),
        base.view(np.recarray),
        base.astype("S4").view(np.char.chararray),
        base.view(np.matrix),
    ]
    with queue_of() as (writer, (reader,)):
        writer.enqueue(kinds)
        for sent, got in zip(kinds, reader.dequeue(), strict=True):
            assert type(got) is type(sent)
            assert np.array_equal(np.asarray(got), np.asarray(sent))
        writer.enqueue(kinds[0])
        assert np.array_equal(reader.dequeue().mask, kinds[0].mask)


def test_arrays_of_any_layout_keep_their_values() -> None:
    """Fortran order, slices, reversed and transposed arrays have their values."""
    base = np.arange(240_000, dtype=np.int32).reshape(400, 600)
    views = [base, base.T, base[::2], base[:, 5:50], base[::-1], np.asfortranarray(base)]
    with queue_of() as (writer, (reader,)):
        writer.enqueue(views)
        for sent, got in zip(views, reader.dequeue(), strict=True):
            assert np.array_equal(sent, got)
            assert got.flags.writeable


CONTAINERS: list[Callable[[Any], Any]] = [
    lambda array: [array, [array]],
    lambda array: (array, (1, array)),
    lambda array: {"a": {("k", 1): array}},
    lambda array: deque([array]),
    lambda array: OrderedDict(a=array),
    lambda array: SimpleNamespace(a=array),
    lambda array: Message(array, [array]),
    lambda array: np.array([array, None, {"b": array}], object),
]


@dataclass
class Message:
    array: Any
    more: Any


@pytest.mark.parametrize("size", [3, 5000, 100_000])
def test_arrays_in_any_container_arrive(size: int) -> None:
    """Copied or as a view; an array that occurs twice comes back as one object."""
    array = np.arange(size, dtype=np.int32)
    with queue_of(max_chunk_bytes=1 << 16) as (writer, (reader,)):
        for wrap in CONTAINERS:
            sent = wrap(array)
            writer.enqueue(sent)
            writer.enqueue(sent)
            got = reader.dequeue()
            assert type(got) is type(sent)
            found = arrays_in(got)
            assert len({id(one) for one in found}) == 1
            assert all(np.array_equal(one, array) for one in found)
            with reader.dequeue_view() as view:
                assert all(np.array_equal(one, array) for one in arrays_in(view))
            del view


def arrays_in(value: Any) -> list[Any]:
    """All arrays of numbers in the containers above."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return [value]
    if isinstance(value, (Message, SimpleNamespace)):
        value = vars(value)
    parts = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list, tuple, deque, np.ndarray)):
        return []
    return [array for part in parts for array in arrays_in(part)]


@pytest.mark.parametrize("readers", [1, 8])
def test_arrays_around_the_size_of_a_chunk_arrive(readers: int) -> None:
    """An array that just fits its chunk beside its stream, and one that just does not."""
    with queue_of(readers, max_chunk_bytes=8192, max_chunks=2) as (writer, ends):
        spills = set()
        for size in range(8192 - 400, 8192 + 9):
            array = np.full(size, size % 251, np.uint8)
            before = writer.statistics().spills
            writer.enqueue(array)
            spills.add(writer.statistics().spills - before)
            for end in ends:
                assert np.array_equal(end.dequeue(timeout=0), array)
        assert spills == {0, 1}


@pytest.mark.parametrize("size", [10, 100_000])
def test_read_only_arrays_become_the_readers_own(size: int) -> None:
    """The returned array is writable; the writer's array stays as it was."""
    array = np.arange(size)
    array.flags.writeable = False
    with queue_of() as (writer, (reader,)):
        writer.enqueue({"deep": [array, (array,)]})
        got = reader.dequeue()["deep"][0]
        got[0] = 7
        assert not array.flags.writeable
        assert array[0] == 0


def test_readers_stop_sharing() -> None:
    """Each reader's array is its own, and outlives the message."""
    with queue_of(2, max_chunk_bytes=1 << 20) as (writer, (one, other)):
        writer.enqueue(np.zeros(100_000, np.uint8))
        mine, theirs = one.dequeue(), other.dequeue()
        mine[:] = 1
        for number in range(10):
            writer.enqueue(np.full(100_000, number, np.uint8))
            one.dequeue()
            other.dequeue()
        assert (mine == 1).all()
        assert (theirs == 0).all()


def test_memory_is_used_again() -> None:
    """A dropped array gives its memory to the next one of its size."""
    with queue_of(max_chunk_bytes=1 << 21) as (writer, (reader,)):
        addresses = set()
        for _ in range(20):
            writer.enqueue(np.zeros(1 << 20, np.uint8))
            addresses.add(reader.dequeue().ctypes.data)
        assert len(addresses) <= 2


def test_arrays_are_aligned() -> None:
    """To 64 bytes, for vector instructions."""
    with queue_of(max_chunk_bytes=1 << 20) as (writer, (reader,)):
        writer.enqueue([np.zeros(5001, np.uint8), np.zeros(70_001, np.uint8)])
        for array in reader.dequeue():
            assert array.ctypes.data % 64 == 0


@pytest.mark.parametrize("size", [12, 60_000])
def test_read_only_arrays_can_stay_read_only(size: int) -> None:
    """With `keep_readonly` an array arrives as writable as it was sent, small or large."""
    fixed, free = np.arange(size), np.arange(size)
    fixed.flags.writeable = False
    with MessageQueue(1, 1, keep_readonly=True) as writer:
        reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
        writer.enqueue([fixed, free])
        got = reader.dequeue()
        assert [array.flags.writeable for array in got] == [False, True]
        assert np.array_equal(got[0], fixed)
        assert not fixed.flags.writeable
        reader.close()
