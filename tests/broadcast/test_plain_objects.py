"""Small plain objects are not pickled, without an observable difference.

Fails if the check of an object misses a type that MessagePack changes, or a container that occurs
twice; and if plain objects are pickled after all.
"""

import enum
import pickle
import struct
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memlane import CorruptMessage
from memlane._native import is_plain
from tests.support.queues import queue_of, ring_in

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

STEP = {
    "step": 104_217,
    "kind": "decode",
    "requests": [f"req-{number}" for number in range(8)],
    "lengths": [0, -1, 2**63 - 1, -(2**63)],
    "rates": [0.5, float("inf"), -0.0],
    "done": [],
    "flags": {"last": True, "none": None, "key": b"\x00\xff"},
}


class Text(str):
    """Equal to its text, but of another type."""


class Number(enum.IntEnum):
    ONE = 1


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def cycle() -> list[Any]:
    value: list[Any] = [1]
    value.append({"back": value})
    return value


SHARED: list[int] = [1, 2]
OTHERS: dict[str, Any] = {
    "tuple": [(1, 2)],
    "set": {"s": {1}},
    "subclass of str": [Text("x")],
    "subclass as a key": {Text("x"): 1},
    "subclass of int": [Number.ONE],
    "subclass of dict": OrderedDict(a=1),
    "default dict": defaultdict(list, {"a": [1]}),
    "numbers as keys": {1: 2},
    "numpy number": [np.float64(1.5)],
    "bytearray": [bytearray(b"x")],
    "complex": 1j,
    "long number": [2**63],
    "long text": ["x" * 257],
    "long bytes": [b"x" * 257],
    "other alphabets": ["ü"],
    "half a character": ["\ud800"],
    "half a character as a key": {"\ud800": 1},
    "deep": nested(17),
    "many": list(range(512)),
    "one list twice": [SHARED, SHARED],
    "one dict twice": {"a": STEP, "b": [STEP]},
    "many that others refer to": [[number] for number in range(40)],
    "a class": [int],
}


@pytest.mark.parametrize("value", OTHERS.values(), ids=OTHERS)
def test_others_are_pickled(value: Any) -> None:
    """Objects that MessagePack would change are pickled, and come back unchanged."""
    kept = list(value) if isinstance(value, list) else None  # so that its parts are referred to
    assert not is_plain(value)
    with queue_of() as (writer, (reader,)):
        writer.enqueue(value)
        got = reader.dequeue()
    assert same(got, value)
    del kept


def same(left: Any, right: Any) -> bool:
    """Equal, with equal types throughout; NaN equals itself."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)


def test_plain_values_take_the_short_cut() -> None:
    """A scheduler's step takes the short cut, and so do small values."""
    for value in (STEP, [], {}, None, True, 1, 1.5, "x", b"x", [{"a": [{}]}], ["x" * 256]):
        assert is_plain(value)
        with queue_of() as (writer, (reader,)):
            writer.enqueue(value)
            assert same(reader.dequeue(), value)


def test_identity_inside_a_message_is_kept() -> None:
    """A container that occurs twice, even in itself, is one object on the other side."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue([SHARED, {"again": SHARED}])
        first, second = reader.dequeue()
        assert first is second["again"]
        assert not is_plain(cycle())
        writer.enqueue(cycle())
        got = reader.dequeue()
        assert got[1]["back"] is got
        writer.enqueue([[], []])
        first, second = reader.dequeue()
        assert first is not second


GARBAGE = {
    "no opcode": b"\xc1",
    "truncated": b"\xdd\xff\xff\xff\xff",
    "more behind it": b"\x01\x01",
    "no text": b"\xa1\xff",
    "a key that cannot be one": b"\x81\x81\x01\x02\x03",
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_broken_bytes_raise_memlanes_error(garbage: bytes) -> None:
    """The error is memlane's own; the message is consumed."""
    with queue_of() as (writer, (reader,)):
        writer.enqueue(["x" * (len(garbage) - 2)] if len(garbage) > 1 else 1)
        with ring_in(writer).get_data(0) as chunk:
            chunk[: len(garbage)] = garbage
        writer.enqueue("next")
        with pytest.raises(CorruptMessage):
            reader.dequeue()
        assert reader.dequeue() == "next"


trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.tuples(st.integers(), st.text()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=30,
)


@given(st.lists(trees, max_size=4))
def test_any_tree_comes_back_with_its_types(values: list[Any]) -> None:
    """With or without the short cut, it comes back with the same types and values."""
    with queue_of(max_chunk_bytes=1 << 16) as (writer, (reader,)):
        for value in values:
            writer.enqueue(value)
            assert same(reader.dequeue(), value)


@st.composite
def graphs(draw: st.DrawFn) -> Any:
    """A container of containers, each of which may occur any number of times."""
    parts: list[Any] = []
    for _ in range(draw(st.integers(1, 6))):
        inner = st.sampled_from([*parts, None, -0.0]) | st.floats()
        several = st.lists(inner, min_size=1, max_size=4)
        parts.append(draw(several | st.dictionaries(st.text(max_size=2), inner, max_size=4)))
    return parts[-1]


def shape(value: Any, seen: dict[int, int]) -> Any:
    """The value, with every repeated container replaced by its number."""
    if not isinstance(value, (list, dict)):
        return type(value), struct.pack("d", value) if isinstance(value, float) else value
    if id(value) in seen:
        return "seen", seen[id(value)]
    seen[id(value)] = len(seen)
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    return type(value), [(key, shape(part, seen)) for key, part in parts]


@given(st.lists(graphs(), max_size=4))
def test_any_graph_keeps_its_identities(values: list[Any]) -> None:
    """Identity of objects is preserved exactly as pickle does."""
    with queue_of(max_chunk_bytes=1 << 16) as (writer, (reader,)):
        for value in values:
            writer.enqueue(value)
            pickled = pickle.loads(pickle.dumps(value))
            assert shape(reader.dequeue(), {}) == shape(pickled, {})
