"""copy_blocks against numpy: any layout, any ids, any number of threads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memlane import PairRefused, copy_blocks

pytestmark = [pytest.mark.wheel, pytest.mark.property]

Array = np.ndarray[Any, Any]
DTYPES = ["i1", "u2", "f4", "c16", "S3"]


@st.composite
def strided(draw: st.DrawFn, blocks: int, shape: tuple[int, ...], dtype: str) -> Array:
    """An array of that shape inside a larger one: gaps, steps and axes in any order."""
    order = draw(st.permutations(range(len(shape) + 1)))
    steps = [draw(st.sampled_from([1, 1, 2, -1, -3])) for _ in order]
    whole = (blocks, *shape)
    sizes = [whole[axis] * abs(steps[axis]) + draw(st.integers(0, 2)) for axis in order]
    memory = np.frombuffer(bytearray(int(np.prod(sizes)) * np.dtype(dtype).itemsize + 1), np.uint8)
    memory[:] = np.arange(memory.size) * 7 + draw(st.integers(0, 255))
    shift = draw(st.integers(0, 1))
    array = memory[shift : memory.size - 1 + shift].view(dtype).reshape(sizes)
    array = array.transpose(np.argsort(order))
    slices = []
    for axis, length in enumerate(whole):
        step = steps[axis]
        slices.append(slice(0, length * step, step) if step > 0 else slice(None, None, step))
    array = array[tuple(slices)]
    return array[tuple(slice(0, length) for length in whole)]


@st.composite
def moves(draw: st.DrawFn) -> tuple[Array, Array, Array]:
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=3)))
    sources, targets = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    src = draw(strided(sources, shape, dtype))
    dst = draw(strided(targets, shape, dtype))
    to = draw(st.lists(st.integers(0, targets - 1), unique=True))
    pairs = [(draw(st.integers(0, sources - 1)), block) for block in to]
    kind = draw(st.sampled_from(["i4", "i8", "u4", ">i8", "u1"]))
    return src, dst, np.array(pairs, kind).reshape(-1, 2)


@settings(max_examples=300)
@given(moves(), st.integers(1, 4))
def test_any_layout_is_copied_as_numpy_copies_it(
    move: tuple[Array, Array, Array], threads: int
) -> None:
    """As numpy's dst[to] = src[from], without touching any other byte."""
    src, dst, pairs = move
    memory: Any = dst
    while isinstance(memory.base, np.ndarray):
        memory = memory.base
    before = memory.copy()
    result = dst.copy()
    result[pairs[:, 1]] = src[pairs[:, 0]]
    moved = copy_blocks(src, dst, pairs, threads=threads)
    assert moved == len(pairs) * src[:1].nbytes
    assert dst.tobytes() == result.tobytes()
    dst[pairs[:, 1]] = before_of(dst, memory, before)[pairs[:, 1]]
    assert memory.tobytes() == before.tobytes()


def before_of(view: Array, memory: Array, before: Array) -> Array:
    """Returns what `view` showed when `memory` was `before`."""
    offset = view.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    return np.ndarray(view.shape, view.dtype, before.data, offset, view.strides)


@settings(max_examples=200)
@given(
    st.integers(1, 9),
    st.integers(0, 40),
    st.integers(0, 40),
    st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11)), unique_by=lambda p: p[1]),
)
def test_views_of_one_memory_are_copied_or_refused(
    size: int, first: int, second: int, pairs: list[tuple[int, int]]
) -> None:
    """Two views of one memory: copied as if from a copy, or refused because they overlap."""
    memory = np.arange(200, dtype=np.uint8)
    before = memory.copy()
    src = memory[first : first + 12 * size].reshape(12, size)
    dst = memory[second : second + 12 * size].reshape(12, size)
    read = {first + a * size + i for a, _ in pairs for i in range(size)}
    written = {second + b * size + i for _, b in pairs for i in range(size)}
    if read & written:
        with pytest.raises(PairRefused):
            copy_blocks(src, dst, pairs)
        assert (memory == before).all()
        return
    copy_blocks(src, dst, pairs)
    for a, b in pairs:
        start = second + b * size
        before[start : start + size] = before[first + a * size : first + a * size + size]
    assert (memory == before).all()


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1023, 1024, 1025, 4095, 4096, 4097, 70_000])
@pytest.mark.parametrize("threads", [None, 1, 2, 4])
def test_copies_are_right_around_the_thresholds(size: int, threads: int | None) -> None:
    """Sorted small blocks, non-temporal large moves, with and without the GIL."""
    rng = np.random.default_rng(size)
    for total in (60_000, 70_000, 9 << 20):
        count = min(total // size + 1, 20_000)
        src = rng.integers(0, 256, (count, size), np.uint8)
        memory = np.zeros(count * size + 64, np.uint8)
        dst = memory[size % 64 : size % 64 + count * size].reshape(count, size)
        pairs = np.stack([rng.integers(0, count, count), rng.permutation(count)], 1)
        pairs = pairs[: max(1, count * 9 // 10)]
        assert copy_blocks(src, dst, pairs, threads=threads) == len(pairs) * size
        expected = np.zeros_like(dst)
        expected[pairs[:, 1]] = src[pairs[:, 0]]
        assert np.array_equal(dst, expected)
        assert not memory[: size % 64].any()
        assert not memory[size % 64 + count * size :].any()
