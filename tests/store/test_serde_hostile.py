"""Arbitrary bytes: a value, or an error that is a MemlaneError and a ValueError; no crash, and no
memory that the bytes do not account for.
"""

import datetime
import mmap
import resource
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

from memlane import CorruptMessage, MemlaneError
from memlane.store import _wire
from memlane.store.serde import MsgpackSerde
from tests.support.missing import package
from tests.support.serdes import MSGPACK, exact, in_chunk, laid

pytestmark = pytest.mark.property

with suppress(ImportError):  # or decoding a tensor would import it
    import torch

    torch.set_num_threads(1)

MANY = 400
SENT: dict[Any, Any] = {
    "array": [np.arange(12, dtype=">i4").reshape(3, 4, order="F"), np.zeros((0, 3))],
    "fields": np.zeros(2, [("a", "M8[s]"), ("b", "S3", (2,))]),
    "plain": [1, 2.5, "x", None],
    (1, b"k"): {"set": {(2,), "y"}, "big": 2**70, "bytes": b"b" * 1500},
    "times": (datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc), np.float32(1)),  # noqa: UP017
    "owned": [bytearray(b"owned"), 1j, np.str_("t"), np.void(b"v")],
}


@contextmanager
def limited() -> Iterator[None]:
    """Makes an allocation of more than a few hundred MiB a MemoryError."""
    with open("/proc/self/statm") as statm:
        now = int(statm.read().split()[0]) * mmap.PAGESIZE
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + (256 << 20), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def read(content: bytes) -> None:
    """Decodes in both ways, and uses everything that results."""
    lying = in_chunk(content)
    for deserialize in (MSGPACK.deserialize, MSGPACK.deserialize_view):
        with limited(), warnings.catch_warnings(action="error"):
            try:
                value = deserialize(lying)
            except MemlaneError as error:
                assert isinstance(error, ValueError), error  # noqa: PT017
            else:
                exact(value)


@pytest.fixture(scope="module")
def content() -> bytes:
    return bytes(laid(MSGPACK, SENT))


@settings(max_examples=MANY)
@given(st.data())
def test_bytes_that_were_changed(content: bytes, data: st.DataObject) -> None:
    """Bytes of the metadata flipped or moved, or its end cut off."""
    changed = bytearray(content)
    length = _wire.HEADER.size + _wire.HEADER.unpack_from(content)[1]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, length - 1))
        how = data.draw(st.sampled_from(["set", "insert", "delete", "cut"]))
        if how == "set":
            changed[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
        elif how == "insert":
            changed[at:at] = data.draw(st.binary(max_size=5))
        elif how == "delete":
            del changed[at : at + data.draw(st.integers(1, 5))]
        else:
            del changed[data.draw(st.integers(0, len(changed))) :]
    read(bytes(changed))


@given(st.binary(max_size=300))
def test_any_bytes_are_a_value_or_an_error(tail: bytes) -> None:
    """As a whole object, and as the tree of a valid header."""
    read(tail)
    read(_wire.HEADER.pack(_wire.MAGIC, len(tail)) + tail + bytes(200))


def of_tree(tree: object, data: bytes = bytes(500)) -> bytes:
    packed = msgpack.encode(tree)
    head = _wire.HEADER.pack(_wire.MAGIC, len(packed)) + packed
    return head + bytes(_wire.gap_behind_metadata(len(head))) + data


LENGTHS = st.integers(0, 20) | st.sampled_from([-1, 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1])
DTYPE_TEXTS = st.sampled_from(
    ["<f4", "|b1", ">M8[s]", "<m8", "|S3", "|S0", "<U1", "|V0", "|V7", "<q", "O", "|O8", "=f4"]
) | st.sampled_from(
    ["f4", "<f3", "<M8[999s]", "|V2147483647", "object", "i4,O", "(2,)f4", "float32", "qint8"]
)
LEAVES = (
    st.none()
    | st.booleans()
    | LENGTHS
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=9)
    | DTYPE_TEXTS
    | st.sampled_from(["UTC", "../../etc/passwd", "Europe", "/etc/passwd", "F", "K"])
)
DTYPE_TREES = st.recursive(
    DTYPE_TEXTS,
    lambda inner: (
        st.tuples(inner, st.lists(LENGTHS, max_size=3))
        | st.integers(0, 3).flatmap(
            lambda count: st.tuples(
                st.lists(st.text(max_size=2) | LEAVES, min_size=count, max_size=count),
                st.lists(inner, min_size=count, max_size=count),
                st.lists(LENGTHS, min_size=count, max_size=count),
                st.lists(st.none() | LEAVES, min_size=count, max_size=count),
                LENGTHS,
                st.booleans(),
            )
        )
    ),
    max_leaves=4,
)
SHAPES = st.lists(LENGTHS, max_size=4)


def nodes(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    tag = st.integers(-1, 24)
    return (
        st.tuples(tag, inner)
        | st.builds(lambda first, rest: [first, *rest], tag, st.lists(inner, max_size=9))
        | st.builds(lambda first, items: [first, False, items], tag, st.lists(inner, max_size=4))
        | st.builds(lambda rest: [10, *rest], st.lists(LENGTHS, min_size=9, max_size=9))
        | st.dictionaries(st.text(max_size=3), inner, max_size=3)
        | st.tuples(st.sampled_from([16, 20]), DTYPE_TREES, SHAPES)
        | st.tuples(st.just(16), DTYPE_TREES, SHAPES, inner)
        | st.tuples(st.just(17), DTYPE_TREES, st.binary(max_size=20) | inner)
        | st.tuples(st.just(22), st.lists(LENGTHS, max_size=3))
    )


@settings(max_examples=MANY)
@given(st.recursive(LEAVES, nodes, max_leaves=12))
def test_any_tree_is_a_value_or_an_error(tree: object) -> None:
    """Every node takes unexpected parts, or raises."""
    read(of_tree(tree))


REFUSED: list[Any] = [
    # an array whose memory would not be there, or elements that have none
    [16, "<f8", [2**62, 8]],
    [16, "<f8", [0, 2**62]],
    [16, "<f8", [-1, -1]],
    [16, "<f4", [1] * 65],
    [16, "<f4", [2**63] * 100_000],
    [16, "<f4", [2**40, "x"]],
    [16, "<f4", [1.0]],
    [16, "<f4", [True]],
    [16, "<f4", "shape"],
    [16, "<f4", [2], "order"],
    [16, "|V0", [2**62]],
    [16, "|S0", [2**40]],
    [16, "|V2147483647", [1]],
    [16, [[], [], [], [], 0, False], [2**62]],
    [16, ["<f4", [2]], [3]],
    [16, ["<f4", [2**31, 2**31]], [1]],
    [16, [["a"], ["<f4"], [2**62], [None], 2**63 - 1, True], [1]],
    [16, [["a", "a"], ["<f4", "<f4"], [0, 4], [None, None], 8, False], [1]],
    # a dtype with objects, or in another spelling than numpy's own
    *([16, text, [0]] for text in ("O", "|O", "|O8", "i4,O", "object", "f4", "=f4", "(2,)f4")),
    [16, [["a"], ["O"], [0], [None], 8, False], [0]],
    # times in units of zero seconds, by which numpy divides when they are compared
    [16, "<M8[0s]", [1]],
    [17, "<m8[000D]", bytes(8)],
    # a number where a constructor takes it for a size
    *([tag, 2**40] for tag in (5, 6, 7, 9, 18, 19)),
    [17, "<f8", 2**40],
    [17, "<f8", b"short"],
    # code points that there are none of
    [17, "<U1", b"\x00\x00\x00\x01"],
    [8, -64],
    # what torch has no tensors of
    [20, "qint8", [1]],
    [20, "Tensor", [1]],
    [20, ["float32"], [1]],
    [20, "float32", [0, 2**62, 2**62]],
    # nodes of another form
    *[[], [99], ["tag"], [None], [0], [0, True], [0, True, {}], [1, True, "text"], [4, 1]],
    [2, False, [[0, True, []]]],
    [4, [0, True, []], 1],
    [10, *[1] * 7, 0, [0, True, []]],
    [15, "../../../etc/passwd"],
    [15, "Europe"],
]


@pytest.mark.parametrize("tree", REFUSED, ids=lambda tree: repr(tree)[:40])
def test_what_is_refused(tree: Any) -> None:
    """Before memory is allocated or work is done that the bytes do not account for."""
    if tree[:1] == [20]:
        package("torch")
    lying = in_chunk(of_tree(tree))
    for deserialize in (MSGPACK.deserialize, MSGPACK.deserialize_view):
        with limited(), pytest.raises(CorruptMessage):
            deserialize(lying)


def test_data_is_used_once() -> None:
    """Nodes cannot share bytes, so copies are never larger than the data."""
    data = bytes(64 << 10)
    read(of_tree([0, False, [[16, "|u1", [len(data)]]] * 10_000], data))
    with pytest.raises(ValueError, match="bytes were expected"):
        MSGPACK.deserialize(in_chunk(of_tree([0, False, [[16, "|u1", [65]]] * 2], bytes(128))))


@pytest.mark.parametrize("tree", [b"\x91" * 100_000, b"\x93\x00\xc2\x91" * 100_000])
def test_deep_trees_are_refused(tree: bytes) -> None:
    """An error, not a stack overflow."""
    read(_wire.HEADER.pack(_wire.MAGIC, len(tree)) + tree)


def test_lengths_of_containers_are_not_trusted() -> None:
    """MessagePack's own lengths are not trusted either."""
    for start in (b"\xdd", b"\xdf", b"\xc6", b"\xdb"):
        tree = start + struct.pack(">I", 0xFFFFFFFF)
        read(_wire.HEADER.pack(_wire.MAGIC, len(tree)) + tree)


def test_the_limit_is_a_limit() -> None:
    """The tests above would notice an allocation that the bytes do not account for."""
    with limited(), pytest.raises(MemoryError):
        np.zeros(1 << 30, np.uint8)
    assert MsgpackSerde().deserialize(in_chunk(of_tree([16, "|u1", [3]]))).shape == (3,)
