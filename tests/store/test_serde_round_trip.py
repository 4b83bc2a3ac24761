"""Any tree of supported types comes back exactly from MsgpackSerde, by copy and by view."""

import datetime
from typing import Any

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.missing import package
from tests.support.serdes import PREAMBLE, both_ways, exact, exported, is_in_use

pytestmark = pytest.mark.property

ZONES = (
    st.none() | st.timezones() | st.just(datetime.timezone(datetime.timedelta(minutes=7), "odd"))
)
TEXTS = st.text(st.characters(exclude_categories=()), max_size=20)
NUMBERS = (
    st.integers()
    | st.integers(-(2**66), 2**66)
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
)
TIMES = st.datetimes(timezones=ZONES) | st.dates() | st.times(timezones=ZONES) | st.timedeltas()
DTYPES = arrays.scalar_dtypes() | arrays.array_dtypes() | arrays.nested_dtypes()
ARRAYS = DTYPES.filter(lambda dtype: dtype.itemsize > 0 and dtype.subdtype is None).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, min_side=0, max_side=4))
)
LAYOUTS = st.sampled_from(
    [lambda a: a, lambda a: a.T, np.asfortranarray, lambda a: a[::2] if a.ndim else a]
)
BYTES = st.binary(max_size=20) | st.integers(1000, 5000).map(bytes)

HASHABLES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS | BYTES | TIMES,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
VALUES = st.recursive(
    HASHABLES
    | BYTES.map(bytearray)
    | st.sets(HASHABLES, max_size=4)
    | st.builds(lambda array, layout: layout(array), ARRAYS, LAYOUTS)
    | ARRAYS.filter(lambda array: array.size).map(lambda array: array.flat[0]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(TEXTS, inner, max_size=5)
        | st.dictionaries(HASHABLES, inner, max_size=5)
    ),
    max_leaves=20,
)


@given(VALUES)
def test_any_tree_comes_back_exactly(value: Any) -> None:
    """Equal, and of the same types throughout."""
    by_copy, by_view = both_ways(value)
    assert exact(by_copy) == exact(value)
    assert exact(by_view) == exact(value)


@given(st.lists(VALUES, max_size=4))
def test_memory_is_free_when_the_value_is_gone(values: list[Any]) -> None:
    """Decoding keeps no export of the memory once the value is dropped."""
    memory, value = exported(values)
    assert len(memory) % 64 == 64 - PREAMBLE
    del value
    assert not is_in_use(memory)


@given(st.data())
def test_any_tensor_comes_back(data: st.DataObject) -> None:
    """Tensors of any dtype, known to numpy or not, come back in any layout."""
    torch = package("torch")
    torch.set_num_threads(1)
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    order = data.draw(st.permutations(range(len(shape))))
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]
    dtype = data.draw(st.sampled_from(dtypes))
    numbers = torch.arange(int(np.prod(shape)) * dtype.itemsize) % (
        2 if dtype == torch.bool else 60
    )
    tensor = numbers.to(torch.uint8).view(dtype).reshape(shape).permute(order)
    for got in both_ways({"tensor": tensor, "other": [1, tensor]}):
        assert exact(got["tensor"]) == exact(got["other"][1]) == exact(tensor)
