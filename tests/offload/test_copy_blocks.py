"""copy_blocks: what it copies, what it refuses, and that a refusal copies nothing."""

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import memlane
from memlane import InvalidArgument, InvalidType, PairRefused, Unsupported, copy_blocks
from tests.support.missing import package

pytestmark = pytest.mark.unit

torch = package("torch")

Array = np.ndarray[Any, Any]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch wants to be rid of both
    QUANTIZED = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    NESTED = torch.nested.nested_tensor([torch.ones(2), torch.ones(2)])


def numbered(blocks: int, *shape: int, dtype: str = "int32") -> Array:
    """An array in which no two elements are the same."""
    return np.arange(blocks * int(np.prod(shape)), dtype=dtype).reshape(blocks, *shape)


def test_moves_what_the_pairs_say() -> None:
    """Block a of src is copied to block b of dst; the rest of dst stays; bytes are counted."""
    src, dst = numbered(10, 6), np.full((8, 6), -1, "int32")
    assert copy_blocks(src, dst, [(9, 0), (2, 7), (2, 3)]) == 3 * 24
    expected = np.full((8, 6), -1)
    expected[[0, 7, 3]] = src[[9, 2, 2]]
    assert (dst == expected).all()


@pytest.mark.parametrize("kind", ["<i4", "<i8", "<u4", "<u8", ">i4", ">i8", "i1", "u2"])
def test_ids_of_any_integer_type_are_accepted(kind: str) -> None:
    """32 and 64 bits are used as they are, others are converted; byte order is respected."""
    src, dst = numbered(100, 3), np.zeros((100, 3), "int32")
    pairs = np.array([[1, 70], [99, 2]], kind)
    copy_blocks(src, dst, pairs)
    assert (dst[[70, 2]] == src[[1, 99]]).all()
    dst[:] = 0
    wide = np.zeros((4, 5), kind)[::2, 1:3]
    wide[...] = pairs
    copy_blocks(src, dst, wide)
    assert (dst[[70, 2]] == src[[1, 99]]).all()
    dst[:] = 0
    odd = np.zeros(pairs.nbytes + 1, np.uint8)[1:].view(kind).reshape(2, 2)  # at any address
    odd[...] = pairs
    copy_blocks(src, dst, odd)
    assert (dst[[70, 2]] == src[[1, 99]]).all()


def test_ids_in_a_tensor_or_a_memoryview_are_accepted() -> None:
    """Anything that holds integers of shape (n, 2) is accepted."""
    src, dst = numbered(5, 2), np.zeros((5, 2), "int32")
    assert copy_blocks(src, dst, torch.tensor([[1, 2]])) == 8
    assert copy_blocks(src, dst, memoryview(np.array([[3, 4]], np.int32))) == 8
    assert (dst[[2, 4]] == src[[1, 3]]).all()


@pytest.mark.parametrize(
    "given",
    [
        lambda pairs: (pair for pair in pairs),
        lambda pairs: zip(*zip(*pairs, strict=True), strict=True),
        lambda pairs: dict(pairs).items(),
        lambda pairs: set(pairs),
        lambda pairs: map(tuple, pairs),
        lambda pairs: deque(pairs),
    ],
    ids=["generator", "zip", "items", "set", "map", "deque"],
)
def test_pairs_may_be_any_iterable(given: Callable[[list[tuple[int, int]]], Any]) -> None:
    """Pairs may come from anything that can be iterated over, once; also none of them."""
    src, dst = numbered(5, 2), np.zeros((5, 2), "int32")
    assert copy_blocks(src, dst, given([(1, 2), (3, 4)])) == 16
    assert (dst[[2, 4]] == src[[1, 3]]).all()
    assert copy_blocks(src, dst, iter(())) == 0


def test_iterating_over_ids_comes_first() -> None:
    """Its own error reaches the caller, and what it does to the arrays is seen by the checks."""
    src, dst = torch.ones(4, 2), torch.zeros(4, 2)

    def failing() -> Iterator[tuple[int, int]]:
        yield (0, 1)
        raise ValueError("out of blocks")

    with pytest.raises(ValueError, match=r"^out of blocks$"):
        copy_blocks(src, dst, failing())
    assert not dst.any()

    def freeing() -> Iterator[tuple[int, int]]:
        src.untyped_storage().resize_(0)
        yield (0, 1)

    with pytest.raises(InvalidArgument, match="no memory"):
        copy_blocks(src, dst, freeing())


def test_blocks_are_copied_between_kinds_of_memory() -> None:
    """numpy, torch of any dtype, bytes: int8 and uint8 fit every dtype of the same size."""
    cache = torch.randn(6, 4, 8).to(torch.bfloat16)
    pool = bytearray(6 * 64)
    rows = memoryview(pool).cast("B", (6, 64))
    assert copy_blocks(cache, rows, [(1, 5), (2, 0)]) == 128
    back = torch.zeros_like(cache)
    assert copy_blocks(rows, back, [(5, 1), (0, 2)]) == 128
    assert torch.equal(back[1:3], cache[1:3])
    region = torch.zeros(6, 256, dtype=torch.int8)[:, 64:128]  # one worker's cells
    copy_blocks(cache, region, [(3, 3)])
    assert torch.equal(region[3].contiguous().view(torch.bfloat16), cache[3].reshape(-1))


def test_one_axis_alone_is_blocks_of_one_element() -> None:
    """Also where these are bytes."""
    to = bytearray(b"......")
    assert copy_blocks(b"abcdef", to, [(0, 5), (5, 0)]) == 2
    assert to == b"f....a"


def test_keys_and_values_may_lie_apart() -> None:
    """A cache of shape (2, blocks, ...) with its axes swapped: two segments per block."""
    cache = numbered(2, 10, 4, 8, dtype="float32")
    pool = np.zeros((10, 2, 4, 8), "float32")
    pairs = np.array([(i, 9 - i) for i in range(10)])
    copy_blocks(cache.transpose(1, 0, 2, 3), pool, pairs)
    assert (pool[pairs[:, 1]] == cache.transpose(1, 0, 2, 3)[pairs[:, 0]]).all()
    other = np.zeros_like(cache)
    copy_blocks(pool, other.transpose(1, 0, 2, 3), pairs)
    assert (other == cache).all()


def test_ids_are_checked_where_nothing_is_to_be_moved() -> None:
    """No pairs, or blocks of no bytes: 0, but ids are still checked."""
    src, dst = numbered(3, 2), numbered(3, 2)
    for none in ([], (), np.empty((0, 2), np.int64), torch.empty(0, 2, dtype=torch.int32)):
        assert copy_blocks(src, dst, none) == 0
    empty = np.empty((3, 0, 7))
    assert copy_blocks(empty, np.empty((3, 0)), [(0, 2)]) == 0
    with pytest.raises(PairRefused):
        copy_blocks(empty, np.empty((3, 0)), [(0, 3)])


@pytest.mark.parametrize(
    ("pairs", "reason", "pair", "block"),
    [
        ([(0, 0), (10, 1)], "no_such_source", 1, 10),
        ([(0, 0), (1, 12)], "no_such_target", 1, 12),
        ([(-1, 0)], "no_such_source", 0, -1),
        ([(0, -12)], "no_such_target", 0, -12),
        (np.array([[0, 2**63 + 5]], np.uint64), "no_such_target", 0, 2**63 + 5),
        (np.array([[2**32, 0]]), "no_such_source", 0, 2**32),
        ([(0, 3), (1, 4), (2, 3), (5, 4)], "target_twice", 2, 3),
    ],
)
def test_a_bad_pair_is_named_and_nothing_is_moved(
    pairs: Any, reason: str, pair: int, block: int
) -> None:
    """It is named in the text and in attributes; nothing is moved, earlier pairs included."""
    src, dst = numbered(10, 4), np.zeros((12, 4), "int32")
    with pytest.raises(PairRefused, match=f"pair {pair} names block {block} of") as caught:
        copy_blocks(src, dst, pairs)
    assert (caught.value.reason, caught.value.pair, caught.value.block) == (reason, pair, block)
    assert isinstance(caught.value, ValueError)
    assert not dst.any()


def test_a_block_that_is_read_is_not_written() -> None:
    """Within one array, and between views of one memory; disjoint blocks may be moved."""
    pool = numbered(8, 4)
    before = pool.copy()
    for pairs in ([(1, 2), (2, 3)], [(1, 1)], [(1, 2), (3, 1)]):
        with pytest.raises(PairRefused) as caught:
            copy_blocks(pool, pool, pairs)
        assert caught.value.reason == "overlap"
    with pytest.raises(PairRefused):
        copy_blocks(pool[::-1], pool, [(0, 7)])
    with pytest.raises(PairRefused):
        copy_blocks(pool.reshape(16, 2), pool.reshape(-1)[1:31].reshape(15, 2), [(3, 2)])
    assert (pool == before).all()
    assert copy_blocks(pool, pool, [(0, 7), (0, 6), (1, 5)]) == 48
    assert (pool[[7, 6, 5]] == before[[0, 0, 1]]).all()
    rows = np.zeros((4, 64), np.int8)
    assert copy_blocks(rows[:, :32], rows[:, 32:], [(i, i) for i in range(4)]) == 128
    one = torch.from_numpy(pool)[3:4].as_strided((1, 4), (0, 1))  # one block steps nowhere
    assert copy_blocks(one, pool, [(0, 0), (0, 7)]) == 32
    assert (pool[[0, 7]] == before[3]).all()


def test_memory_that_cannot_be_told_apart() -> None:
    """Refused rather than guessed: one memory in two layouts; blocks of dst that overlap."""
    memory = np.zeros(256, np.int8)
    with pytest.raises(InvalidArgument, match="too different to tell"):
        copy_blocks(memory.reshape(2, 8, 16).transpose(1, 0, 2), memory.reshape(8, 32), [(0, 1)])
    windows = np.lib.stride_tricks.sliding_window_view(memory, 16, writeable=True)
    with pytest.raises(InvalidArgument, match="share memory with each other"):
        copy_blocks(np.ones((2, 16), np.int8), windows, [(0, 0)])
    assert copy_blocks(windows, np.zeros((2, 16), np.int8), [(3, 0), (4, 1)]) == 32
    assert not memory.any()


@pytest.mark.parametrize(
    ("src", "dst", "error", "text"),
    [
        (np.zeros((2, 3)), np.zeros((2, 4)), InvalidArgument, "has 24 bytes"),
        (np.zeros((2, 3), "f4"), np.zeros((2, 3), "i4"), InvalidArgument, "do not convert"),
        (np.zeros((2, 3), "<f4"), np.zeros((2, 3), ">f4"), InvalidArgument, "do not convert"),
        (np.zeros(()), np.zeros(()), InvalidArgument, "has no axis"),
        (np.zeros((2, 1), object), np.zeros((2, 8), "i1"), InvalidType, "Python objects"),
        ([[1], [2]], np.zeros((2, 1)), InvalidType, "not list"),
        (None, np.zeros((2, 1)), InvalidType, "not NoneType"),
        (np.zeros((2, 4), "i1"), bytes(8), InvalidArgument, "read-only"),
        (torch.zeros(2, 2).to_sparse(), np.zeros((2, 2), "f4"), InvalidType, "plain tensor"),
        (torch.zeros(2, 2, device="meta"), np.zeros((2, 2), "f4"), InvalidType, "plain tensor"),
        (torch.zeros(2, dtype=torch.cfloat).conj(), np.zeros(2, "c8"), InvalidType, "lazily"),
        (torch.zeros(2, dtype=torch.cfloat).conj().imag, np.zeros(2, "f4"), InvalidType, "lazily"),
        (QUANTIZED, np.zeros((2, 2), "i1"), InvalidType, "plain tensor"),
        (NESTED, np.zeros((2, 2), "f4"), InvalidType, "plain tensor"),
        (np.broadcast_to(np.int8(1), (2**33, 1)), np.zeros((2, 1), "i1"), InvalidArgument, "more"),
        (np.zeros((1, 2**21), "i2")[:, ::2], np.zeros((1, 2**20), "i2"), None, ""),
        (np.zeros((1, 2**22), "i1")[:, ::2], np.zeros((1, 2**21), "i1"), InvalidArgument, "pieces"),
    ],
)
def test_arrays_that_do_not_fit(src: Any, dst: Any, error: Any, text: str) -> None:
    """Each mismatch has its own error text."""
    if error is None:
        assert copy_blocks(src, dst, [(0, 0)]) > 0
        return
    with pytest.raises(error, match=text):
        copy_blocks(src, dst, [(0, 0)])


def test_a_read_only_destination_is_refused() -> None:
    """An array's flag counts; a released view is no memory."""
    src, dst = numbered(2, 2), numbered(2, 2)
    dst.flags.writeable = False
    with pytest.raises(InvalidArgument, match="read-only"):
        copy_blocks(src, dst, [(0, 1)])
    view = memoryview(bytearray(8))
    view.release()
    with pytest.raises(InvalidArgument, match="cannot be used"):
        copy_blocks(src, view, [(0, 1)])


@pytest.mark.parametrize("first", [0, 2])
def test_a_tensor_whose_memory_was_freed(first: int) -> None:
    """As sharded models do; nor do tensors that are only traced have memory."""
    whole = torch.zeros(4, 2)
    src, dst = whole[first:], torch.zeros(4, 2)
    whole.untyped_storage().resize_(0)
    for from_blocks, to_blocks in ((src, dst), (dst, src)):
        with pytest.raises(InvalidArgument, match="no memory"):
            copy_blocks(from_blocks, to_blocks, [(0, 1)])
    mapped = torch.vmap(lambda block: copy_blocks(block, dst, [(0, 1)]))
    with pytest.raises(InvalidType, match="no memory"):
        mapped(torch.zeros(1, 4, 2))


@pytest.mark.parametrize(
    ("pairs", "error"),
    [
        ([(1, 2, 3)], InvalidArgument),
        ([1, 2], InvalidArgument),
        (5, InvalidArgument),
        (iter([1, 2]), InvalidArgument),
        ({1: 2}, InvalidArgument),
        ("12", InvalidArgument),
        ([(1, 2), (3,)], InvalidArgument),
        (np.zeros((1, 2, 2), int), InvalidArgument),
        ([(1.0, 2.0)], InvalidType),
        ([(2**70, 0)], InvalidType),
        ([("a", "b")], InvalidType),
        (np.zeros((1, 2), bool), InvalidType),
    ],
)
def test_pairs_that_are_none(pairs: Any, error: type[Exception]) -> None:
    """Wrong shapes and types of the ids are refused."""
    dst = np.zeros((10, 4), "int32")
    with pytest.raises(error, match="pairs must"):
        copy_blocks(numbered(10, 4), dst, pairs)
    assert not dst.any()


@pytest.mark.parametrize("threads", [0, -1, 257, 1.5, True, "2"])
def test_impossible_numbers_of_threads_are_refused(threads: Any) -> None:
    """A whole number from 1 to 256, or None."""
    with pytest.raises((InvalidArgument, InvalidType), match="threads must"):
        copy_blocks(numbered(2, 2), numbered(2, 2), [(0, 1)], threads=threads)


def test_a_stream_without_a_gpu_is_refused() -> None:
    """The error says that there is no GPU, and nothing is moved."""
    dst = np.zeros((2, 2), "int32")
    with pytest.raises((Unsupported, InvalidArgument), match="moves to or from a GPU"):
        copy_blocks(numbered(2, 2), dst, [(0, 1)], stream=object())  # type: ignore[call-overload]
    assert not dst.any()


def test_it_is_exported() -> None:
    """From the package itself, with its errors."""
    assert memlane.copy_blocks is copy_blocks
    assert issubclass(memlane.CopyFailed, RuntimeError)
