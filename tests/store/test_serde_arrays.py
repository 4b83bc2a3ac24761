"""Arrays through a serde: every dtype, shape and layout, as copies and in place."""

from typing import Any

import numpy as np
import pytest

from memlane import InvalidType
from tests.support.serdes import MSGPACK, both_ways, exact, exported, is_in_use, laid

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

DTYPES = [
    *["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "q", "Q", "f2", "f4", "f8", "g"],
    *["c8", "c16", "G", ">i2", ">u4", ">i8", ">q", ">f2", ">f8", ">c16"],
    *["M8", "M8[s]", "M8[25ns]", ">M8[D]", "m8[ms]", "m8", "S5", "U7", ">U3", "V3"],
    [("a", "i4"), ("b", ">f8"), ("c", "u1", (3,)), ("d", "M8[us]"), ("e", "S3")],
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
    np.dtype({"names": ["x", "y"], "formats": ["i4", "i2"], "offsets": [4, 0], "itemsize": 11}),
    np.dtype([(("title", "name"), "i4"), ("in", [("deep", "f4", (2, 2)), ("er", "?")])]),
    np.dtype({"names": ["whole", "part"], "formats": ["u4", "u1"], "offsets": [0, 1]}),
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (0, 3), (5,), (1, 1), (40, 40), (30, 70, 3)]


def filled(shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
    """Varied bytes, valid for every dtype."""
    array = np.zeros(shape, dtype)
    if array.nbytes:
        content = (np.arange(array.nbytes) * 7 % 91 + 1).astype(np.uint8)
        array = np.ndarray(shape, array.dtype, content)
        if array.dtype.kind in "bUOg":
            array = np.ones(shape, dtype).astype(array.dtype)
    return array


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_every_dtype_and_shape_come_back(dtype: Any) -> None:
    """By copy writable and in its own memory; by view read-only and in place."""
    for shape in SHAPES:
        array = filled(shape, dtype)
        lying = laid(MSGPACK, [array])
        before = bytes(lying)
        (owned,), (viewed,) = MSGPACK.deserialize(lying), MSGPACK.deserialize_view(lying)
        assert exact(owned) == exact(viewed) == exact(array)
        assert owned.flags.writeable
        assert not viewed.flags.writeable
        assert not np.may_share_memory(owned, np.asarray(lying))
        assert np.may_share_memory(viewed, np.asarray(lying)) == bool(array.size)
        owned.fill(np.zeros((), dtype)[()])
        assert bytes(lying) == before


def test_layouts_are_kept_or_gathered() -> None:
    """Fortran order is kept; arrays with gaps are gathered; read-only ones come back writable."""
    base = np.arange(24_000, dtype=">i4").reshape(20, 30, 40)
    base.flags.writeable = False
    fortran = np.asfortranarray(base)
    layouts = [base, base.T, fortran, fortran[0], base[::2], base[:, 5:9], base[::-1], base[..., 0]]
    layouts += [np.broadcast_to(base[0, 0], (9, 40)), base.transpose(1, 0, 2), base[3:3].T]
    for array in layouts:
        for got in both_ways(array):
            assert np.array_equal(got, array)
            assert got.dtype == array.dtype
            assert got.flags.f_contiguous == array.flags.f_contiguous or not array.flags.forc
        assert both_ways(array)[0].flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.array([{}]),
        np.zeros(2, [("a", "i4"), ("b", "O")]),
        np.zeros(2, [("a", [("b", "O", (2,))])]),
        np.ma.zeros(3),
        np.zeros(3, [("a", "i4")]).view(np.recarray),
        np.zeros(3, [("a", "i4")]).view(np.dtype((np.record, [("a", "i4")]))),
        np.zeros(3, np.dtype([])),
        np.zeros(1, [("a", "O")])[0],
        np.zeros(3, np.dtype("f4", metadata={"unit": "m"})),
        np.zeros(3, [("a", np.dtype("i4", metadata={"unit": "m"}))]),
        np.zeros(3, np.dtype([("a", "i4")], metadata={"unit": "m"})),
        np.zeros(3, [("a", (np.dtype("i4", metadata={"unit": "m"}), (2,)))]),
        np.zeros(1, np.dtype([("a", "i4")], metadata={"unit": "m"}))[0],
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_that_cannot_travel(array: Any) -> None:
    """Arrays of objects, subclasses, elements without memory, and dtypes with metadata."""
    with pytest.raises(InvalidType, match="Unsupported object type"):
        MSGPACK.serialize({"array": array})


def test_memory_is_used_again() -> None:
    """A dropped array gives its memory to the next one of its size."""
    lying = laid(MSGPACK, np.zeros(1 << 20, np.uint8))
    assert len({MSGPACK.deserialize(lying).ctypes.data for _ in range(20)}) <= 2


PARTS = {"array": np.ones(70), "structured": np.ones(70, "M8[s]"), "bytes": b"b" * 2000}


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_views_keep_their_memory(part: Any) -> None:
    """Anything derived from a view exports the memory; the last one frees it."""
    memory, value = exported({"part": part, "other": np.ones(5)})
    assert is_in_use(memory)
    kept = value["part"][10:20]
    del value
    assert is_in_use(memory)
    del kept
    assert not is_in_use(memory)
