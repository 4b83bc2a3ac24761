"""`dequeue_view`: arrays that alias shared memory, and what happens if they outlive the block."""

import gc
import logging
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pickle import PickleBuffer
from typing import Any

import numpy as np
import pytest

from memlane import MessageQueue, ViewInUse
from tests.support.missing import package
from tests.support.queues import file_of, queue_of, refuses

pytestmark = pytest.mark.unit

torch = package("torch")

CHUNK = 1 << 16
ARRAY = np.arange(2000, dtype=np.float64).reshape(40, 50)
LARGE = np.arange(3 * CHUNK, dtype=np.uint32)  # stored in an extent


@dataclass
class Step:
    """A message as engines have them."""

    array: Any
    more: Any = None


@dataclass(slots=True)
class Slotted:
    array: Any


SURVIVORS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "the array": (ARRAY, lambda view: view),
    "a slice": (ARRAY, lambda view: view[3:]),
    "a slice of a slice": (ARRAY, lambda view: view[3:][:, 2:]),
    "its transpose": (ARRAY, lambda view: view.T),
    "its memory": (ARRAY, memoryview),
    "its flat iterator": (ARRAY, lambda view: view.flat),
    "a large array": (LARGE, lambda view: view[1:]),
    "the list": ([ARRAY], lambda view: view),
    "out of a list": ([ARRAY], lambda view: view[0]),
    "out of a dict": ({"a": {"b": (1, ARRAY)}}, lambda view: view["a"]["b"][1]),
    "an inner list": ([1, [ARRAY, 2]], lambda view: view[1]),
    "out of a deque": (deque([ARRAY]), lambda view: view[0]),
    "out of an array of objects": (np.array([ARRAY, None], object), lambda view: view[0]),
    "out of an object": (Step(ARRAY), lambda view: view.array),
    "an object in an object": (Step(1, [Step(ARRAY)]), lambda view: view.more[0]),
    "attributes": (Step(ARRAY), vars),
    "out of an object with slots": (Slotted(ARRAY), lambda view: view.array),
    "a buffer": (PickleBuffer(ARRAY), lambda view: view[1:]),
}
survivors = pytest.mark.parametrize(("sent", "keep"), SURVIVORS.values(), ids=SURVIVORS)

HARMLESS: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "nothing": (ARRAY, lambda view: None),
    "a copy": (ARRAY, lambda view: view[3:].copy()),
    "a number": (ARRAY, lambda view: view[3, 4]),
    "a large array": (LARGE, lambda view: int(view.sum())),
    "one array twice": ([ARRAY, ARRAY], lambda view: view[0] is view[1]),
    "an array and its slice": ((ARRAY, ARRAY[:20]), lambda view: len(view)),
    "an array in two objects": ([Step(ARRAY), Slotted(ARRAY), ARRAY], lambda view: None),
    "an object that everybody knows": ([Step(ARRAY, logging.getLogger())], lambda view: None),
    "other things of a dict": ({"a": ARRAY, "n": [1, "x"]}, lambda view: view["n"]),
    "other things of an object": (Step(ARRAY, Step(1)), lambda view: view.more),
    "a small array beside": ([ARRAY, np.ones(3)], lambda view: view[1][1:]),
    "a small tensor beside": ([ARRAY, torch.ones(3)], lambda view: view[1][1:]),
    "a parameter": (torch.nn.Parameter(torch.ones(5000)), lambda view: view.data),
    "sparse": ([ARRAY, torch.ones(70, 70).to_sparse(), torch.eye(3).to_sparse_csr()], len),
    "nested": ([ARRAY, torch.nested.nested_tensor([torch.ones(2000), torch.ones(3)])], len),
    "a tensor without memory": ([ARRAY, torch.ones(70, 70, device="meta")], len),
    "a tensor": (torch.from_numpy(ARRAY), lambda view: view),
    "a tensor's slice": (torch.from_numpy(ARRAY), lambda view: view[1:]),
    "a tensor as numpy": ({"t": torch.from_numpy(ARRAY)}, lambda view: view["t"].numpy()),
    "a large tensor": (torch.from_numpy(LARGE), lambda view: view.reshape(3, -1)),
    "out of a module": (torch.nn.Linear(70, 70), lambda view: view.weight),
    "tensors": ({"t": [torch.ones(5000), torch.ones(6000)]}, lambda view: list(view)),
    "nothing that aliases": ({"a": [1, 2]}, lambda view: view["a"]),
    "bytes": (b"x" * (3 * CHUNK), lambda view: view),
    "a small array": (np.ones(3), lambda view: view),
}
harmless = pytest.mark.parametrize(("sent", "use"), HARMLESS.values(), ids=HARMLESS)


def mapped_at(address: int) -> str:
    """The mapping at that address, as the kernel reports it."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(number, 16) for number in line.split()[0].split("-"))
        if first <= address < last:
            return line
    raise AssertionError("nothing is mapped there")


def views(queue: MessageQueue) -> int:
    """Number of chunks that the first reader keeps, as the segment says."""
    return queue.statistics().readers[0].views


@survivors
def test_a_surviving_view_raises_and_keeps_its_chunk(
    sent: Any, keep: Callable[[Any], object]
) -> None:
    """Leaving raises; the chunk is kept, and given back with the last alias."""
    with queue_of(max_chunk_bytes=CHUNK, max_chunks=1) as (writer, (reader,)):
        writer.enqueue(sent)
        kept: list[object] = []
        with refuses(BufferError) as caught, reader.dequeue_view() as view:
            kept.append(keep(view))
        assert isinstance(caught.value, ViewInUse)
        del caught, view
        assert views(writer) == 1
        with refuses(TimeoutError, match="holds views of 1 chunk for "):
            writer.enqueue("next", timeout=0)
        with refuses(ViewInUse):
            reader.dequeue(timeout=0)
        kept.clear()
        assert views(writer) == 0
        writer.enqueue("next", timeout=0)
        assert reader.dequeue(timeout=0) == "next"


@harmless
def test_a_block_without_survivors_frees_its_chunk(sent: Any, use: Callable[[Any], object]) -> None:
    """The block's own name is allowed; the chunk is given back when it is dropped."""
    with queue_of(max_chunk_bytes=CHUNK, max_chunks=1) as (writer, (reader,)):
        writer.enqueue(sent)
        with reader.dequeue_view() as view:
            used = use(view)
        del view
        writer.enqueue("next", timeout=0)
        with reader.dequeue_view(timeout=0) as view:
            assert view == "next"
        del used


def test_names_of_a_tuple_may_outlive_the_block() -> None:
    """`as (a, b)` leaves two names, which are allowed; references taken from the arrays are not."""
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        writer.enqueue((ARRAY, 2 * ARRAY))
        with reader.dequeue_view() as (one, two):
            np.testing.assert_array_equal(2 * one, two)
        writer.enqueue((ARRAY, 2 * ARRAY))
        with refuses(ViewInUse), reader.dequeue_view() as (one, two):
            part = two[1:]
        del one, two, part
        assert views(writer) == 0


@pytest.mark.parametrize("sent", [ARRAY, LARGE], ids=["chunk", "extent"])
def test_it_aliases(sent: "np.ndarray[Any, Any]") -> None:
    """Nothing is copied: it lies in the segment, aligned, and nobody here can write to it.

    numpy refuses; a write past numpy, as by `torch.from_numpy`, would end this process.
    """
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        writer.enqueue(sent)
        with reader.dequeue_view() as view:
            np.testing.assert_array_equal(view, sent)
            assert view.dtype == sent.dtype
            assert not view.flags.writeable
            assert view.ctypes.data % 64 == 0
            line = mapped_at(view.ctypes.data)
            assert writer.handle.queue_id in line
            assert " r--s " in line
            with pytest.raises(ValueError, match="read-only"):
                view[0] = 1


@pytest.mark.parametrize("sent", [ARRAY, LARGE], ids=["chunk", "extent"])
def test_a_write_to_a_tensor_reaches_nobody(sent: "np.ndarray[Any, Any]") -> None:
    """torch has no read-only memory, so a view's tensors are copies, and outlive it."""
    message = {"tensor": torch.from_numpy(sent), "parameter": torch.nn.Parameter(torch.ones(5000))}
    with queue_of(2, max_chunk_bytes=CHUNK) as (writer, (one, two)):
        writer.enqueue(message)
        with one.dequeue_view() as view:
            kept = [view["tensor"][1:], view["parameter"].detach().numpy()]
            kept[0].zero_()
            kept[1][:] = 0
        with two.dequeue_view() as view:
            assert torch.equal(view["tensor"], message["tensor"])
            assert torch.equal(view["parameter"], message["parameter"])
        assert not kept[0].any()


def bytes_of(tensor: "torch.Tensor") -> bytes:
    return bytes(tensor.view(torch.uint8).numpy())


def test_tensors_in_views_cause_no_warning() -> None:
    """torch would warn about read-only memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool, torch.int8):
            sent = torch.ones(70, 80).to(dtype)
            with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
                writer.enqueue(sent)
                with reader.dequeue_view() as view:
                    assert view.dtype == dtype
                    assert bytes_of(view) == bytes_of(sent)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.complex128])
def test_unaligned_tensors_are_copied(dtype: "torch.dtype") -> None:
    """torch relies on alignment, so an unaligned tensor is copied."""
    sent = torch.ones(3000).to(dtype)
    with queue_of(max_chunk_bytes=CHUNK + 1) as (writer, (reader,)):
        for _ in range(3):
            writer.enqueue(sent)
            with reader.dequeue_view() as view:
                assert view.data_ptr() % dtype.itemsize == 0
                assert torch.equal(view, sent)


def test_views_are_given_back_in_any_order() -> None:
    """A reader continues while it holds views, and gives them back in any order."""
    with queue_of(max_chunk_bytes=CHUNK, max_chunks=4) as (writer, (reader,)):
        for number in range(3):
            writer.enqueue(number * ARRAY)
        kept = []
        for _ in range(3):
            with refuses(ViewInUse), reader.dequeue_view() as view:
                kept.append(view)
        del view
        assert views(writer) == 3
        assert [array[0, 1] for array in kept] == [0, 1, 2]
        writer.enqueue("small")
        assert reader.dequeue() == "small"
        del kept[1]
        with refuses(TimeoutError, match="holds views of 2 chunks"):
            writer.enqueue("the first is still held", timeout=0)
        np.testing.assert_array_equal(kept[1], 2 * ARRAY)
        first = kept.pop(0)
        np.testing.assert_array_equal(first, 0 * ARRAY)
        del first
        for number in range(2):
            writer.enqueue(number, timeout=0)
            assert reader.dequeue() == number
        with refuses(ViewInUse):  # the chunk of the next message is the third's
            reader.dequeue()
        kept.clear()
        writer.enqueue("free", timeout=0)
        assert reader.dequeue() == "free"


def test_statistics_show_the_oldest_view() -> None:
    """Statistics give the number of views, and the time of the oldest."""
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        assert writer.statistics().readers[0].views_since is None
        writer.enqueue(ARRAY)
        writer.enqueue(ARRAY)
        with reader.dequeue_view() as one:
            before = writer.statistics().readers[0]
            with reader.dequeue_view() as two:
                now = writer.statistics().readers[0]
                assert (before.views, now.views) == (1, 2)
                assert before.views_since == now.views_since
        del one
        assert two is not None
        after = writer.statistics().readers[0]
        assert after.views == 1
        assert after.views_since is not None
        assert before.views_since is not None
        assert after.views_since > before.views_since


def keep_and_fail(kept: list[object], view: "np.ndarray[Any, Any]") -> None:
    kept.append(view[1:])
    raise ZeroDivisionError


def test_an_error_in_the_block_wins() -> None:
    """Its traceback refers to everything; the chunk is given back when that is dropped."""
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        writer.enqueue(ARRAY)
        kept: list[object] = []
        with pytest.raises(ZeroDivisionError), reader.dequeue_view() as view:
            keep_and_fail(kept, view)
        assert views(writer) == 1
        del view
        kept.clear()
        gc.collect()
        assert views(writer) == 0


@pytest.mark.parametrize(
    "beside", [None, bytes(CHUNK // 2), ARRAY, [ARRAY, bytes(3 * CHUNK)], LARGE]
)
def test_decoding_fails(beside: object) -> None:
    """M3, at each size: the message is consumed, its chunk given back though the error exists."""
    with queue_of(max_chunk_bytes=CHUNK, max_chunks=1) as (writer, (reader,)):
        writer.enqueue([beside, Bomb()])
        with pytest.raises(ZeroDivisionError) as caught, reader.dequeue_view():
            raise AssertionError("the block must not be entered")
        assert caught.value.__traceback__
        assert views(writer) == 0
        writer.enqueue(ARRAY, timeout=0)
        with reader.dequeue_view(timeout=0) as view:
            np.testing.assert_array_equal(view, ARRAY)


class Bomb:
    """Raises when it is decoded."""

    def __reduce__(self) -> Any:
        return divmod, (1, 0)


def test_timeouts_and_roles_are_those_of_dequeue() -> None:
    """As `dequeue`: nothing is consumed by a timeout, and only readers may."""
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        with refuses(TimeoutError), reader.dequeue_view(timeout=0):
            pass
        with refuses(RuntimeError, match="Only readers can dequeue_view"):
            writer.dequeue_view()
        writer.enqueue(ARRAY)
        with reader.dequeue_view(timeout=0) as view:
            np.testing.assert_array_equal(view, ARRAY)


def test_an_end_with_views_closes_at_once() -> None:
    """The end closes at once; memory stays mapped until the last view goes."""
    with queue_of(max_chunk_bytes=CHUNK) as (writer, (reader,)):
        writer.enqueue(ARRAY)
        writer.enqueue(LARGE)
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept = [view[1:]]
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept.append(view[1:])
        reader.close()
        writer.close()
        np.testing.assert_array_equal(kept[0], ARRAY[1:])
        np.testing.assert_array_equal(kept[1], LARGE[1:])


def test_extents_of_views_are_not_reused() -> None:
    """An extent does not change while it has a view, and is reused afterwards."""
    with queue_of(max_chunk_bytes=4096, max_chunks=2) as (writer, (reader,)):
        writer.enqueue(LARGE)
        with refuses(ViewInUse), reader.dequeue_view() as view:
            kept = view[:]
        writer.enqueue(LARGE + 1, timeout=0)
        np.testing.assert_array_equal(reader.dequeue(), LARGE + 1)
        np.testing.assert_array_equal(kept, LARGE)
        del kept, view
        for number in range(20):
            writer.enqueue(LARGE + number, timeout=0)
            with reader.dequeue_view(timeout=0) as view:
                assert view[-1] == LARGE[-1] + number
            del view
        assert file_of(writer).st_size < 4 * LARGE.nbytes
