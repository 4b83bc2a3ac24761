"""Large arrays and tensors are lent to readers, and yet belong to them alone.

Fails without the guard: an extent that is written to while an array refers to it, a page that still
has what the reader wrote into an earlier message, or a write that reaches another process.
"""

import gc
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import MessageQueue, testing
from memlane._native import LentBuffer
from tests.support import PATIENCE, holdings, is_sanitized, surplus
from tests.support.missing import needed, package
from tests.support.queues import file_of, queue_of

pytestmark = pytest.mark.unit

torch = package("torch")

torch.set_num_threads(1)  # its threads would be taken for something that was left
MIB = 1 << 20
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def numbered(number: int, size: int = 3 * MIB + 100) -> Bytes:
    return np.full(size, number, np.uint8)


def origin_of(array: Any) -> object:
    """The object that an array's memory belongs to."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    return base.obj


def is_lent(array: Any) -> bool:
    return isinstance(origin_of(array), LentBuffer)


@contextmanager
def small_pool(mebibytes: int, readers: int = 1) -> Iterator[tuple[MessageQueue, MessageQueue]]:
    with (
        MessageQueue(readers, readers, None, 4096, 3, max_extent_bytes=mebibytes * MIB) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), 0) as reader,
    ):
        yield writer, reader


def test_arrays_are_writable_and_ones_own() -> None:
    """Two readers write to their arrays; neither sees the other's writes, nor does the sender."""
    with queue_of(2) as (writer, (one, other)):
        sent = numbered(1)
        writer.enqueue({"array": sent, "small": np.ones(9)})
        first, second = one.dequeue()["array"], other.dequeue()["array"]
        assert is_lent(first)
        assert is_lent(second)
        first[::4096] = 2
        second += 3
        assert (first[::4096] == 2).all()
        assert (first[1::4096] == 1).all()
        assert (second == 4).all()
        assert (sent == 1).all()


def test_a_reader_never_sees_what_it_wrote_into_an_older_message() -> None:
    """Pages it wrote to show the file again when the next message is there."""
    with small_pool(4) as (writer, reader):
        for number in range(1, 30):
            writer.enqueue(numbered(number))
            array = reader.dequeue()
            assert is_lent(array)
            assert (array == number).all()
            array[(number * 4096) % array.size :: 7 * 4096] = 255
            array[-1] = 254
            del array


def test_kept_in_any_order_for_any_number_of_messages() -> None:
    """Kept arrays do not change, lent or not; the writer waits for none of them."""
    with small_pool(16) as (writer, reader):
        kept: dict[int, Bytes] = {}
        lent = 0
        for number in range(60):
            writer.enqueue(numbered(number), timeout=0)
            kept[number] = reader.dequeue(timeout=0)
            lent += is_lent(kept[number])
            for old in (number - 2 * (number % 4), number - 11):
                if old in kept and old % 3:
                    array = kept.pop(old)
                    assert (array == old).all()
                    del array
            assert all((array == number).all() for number, array in kept.items())
        assert 4 < lent < 60
        assert file_of(writer).st_blocks * 512 < 24 * MIB


@pytest.mark.parametrize(
    "part_of",
    [
        lambda array: array[5:-5],
        lambda array: array.reshape(-1, 4)[::2, 1:],
        memoryview,
        lambda array: [array.view(np.int8)],
        lambda array: torch.from_numpy(array)[7:],
        lambda array: torch.nn.Parameter(torch.from_numpy(array).view(torch.float32)),
    ],
    ids=["slice", "strided", "memoryview", "view", "tensor", "Parameter"],
)
def test_whatever_refers_to_it_keeps_it(part_of: Any) -> None:
    """The extent is reused when the last reference is gone, and not before."""
    size = 4 * MIB
    with small_pool(5) as (writer, reader):
        writer.enqueue(numbered(1, size))
        array = reader.dequeue()
        assert is_lent(array)
        part = part_of(array)
        del array
        gc.collect()
        for number in range(2, 8):
            writer.enqueue(numbered(number, size))
            other = reader.dequeue()
            assert not is_lent(other)  # the only place is taken
            assert (other == number).all()
            del other
        shown = part[0] if isinstance(part, list) else part
        shown = shown.detach() if isinstance(shown, torch.Tensor) else shown
        assert bytes(np.asarray(shown).tobytes()[:4]) == b"\1\1\1\1"
        del part, shown
        writer.enqueue(numbered(9, size))
        assert is_lent(reader.dequeue())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool])
def test_tensors_of_every_dtype_are_lent(dtype: torch.dtype) -> None:
    """Tensors of every dtype are lent; several of one message share it."""
    with small_pool(8) as (writer, reader):
        for _ in range(3):
            sent = [torch.ones(2 * MIB, dtype=torch.uint8).to(dtype) for _ in range(2)]
            sent[0].requires_grad_(dtype.is_floating_point)
            writer.enqueue(sent)
            first, second = reader.dequeue()
            del first
            assert second.dtype == dtype
            assert (second.float() == 1).all()
            with torch.no_grad():
                second.zero_()
            del second


def test_dropped_in_other_threads() -> None:
    """Threads that keep, change and drop arrays while others come."""
    with small_pool(32) as (writer, reader):
        wrong: list[int] = []

        def use(array: Bytes, number: int) -> None:
            array[number % 100 :: 4096] = number
            if not (array == number).all():
                wrong.append(number)

        threads = []
        for number in range(100):
            writer.enqueue(numbered(number))
            thread = threading.Thread(target=use, args=(reader.dequeue(), number))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        assert not wrong


def test_lend_false_copies() -> None:
    """Nothing of the message is kept."""
    with small_pool(64) as (writer, reader):
        writer.enqueue(numbered(1))
        array = reader.dequeue(lend=False)
        assert not is_lent(array)
        assert (array == 1).all()


def test_close_leaves_what_was_lent() -> None:
    """Lent arrays stay the reader's own, even after its end or the writer's has closed."""
    with queue_of(2, max_chunks=2) as (writer, (one, other)):
        writer.enqueue(numbered(1))
        kept = one.dequeue()
        assert is_lent(kept)
        other.dequeue()
        one.close()
        for number in range(2, 9):
            writer.enqueue(numbered(number))
            assert (other.dequeue() == number).all()
        last = numbered(9)
        writer.enqueue(last)
        other_kept = other.dequeue()
        writer.close()
        assert (kept == 1).all()
        assert (other_kept == 9).all()
        kept[:] = 5
        assert (other_kept == 9).all()


def test_a_process_without_its_pagemap_drops_all_pages() -> None:
    """A process that may not read its own pagemap drops all pages."""
    import ctypes

    libc = ctypes.CDLL(None)
    assert libc.prctl(4, 0, 0, 0, 0) == 0  # PR_SET_DUMPABLE: /proc/self is root's
    try:
        test_a_reader_never_sees_what_it_wrote_into_an_older_message()
    finally:
        libc.prctl(4, 1, 0, 0, 0)


def copied_pages() -> int:
    """Kilobytes of this process that are private and were written to."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Private_Dirty:")[1].split()[0])


@pytest.mark.skipif(is_sanitized(), reason="a sanitizer's shadow is private memory, too")
def test_what_was_written_is_given_back() -> None:
    """Pages that a reader wrote to use memory only as long as it keeps the array."""
    with small_pool(64) as (writer, reader):
        writer.enqueue(numbered(1, 32 * MIB))
        array = reader.dequeue()
        before = copied_pages()
        array[:] = 2
        assert copied_pages() - before > 31 * 1024
        del array
        assert copied_pages() - before < 1024


@pytest.mark.slow
@needed("4 GiB of /dev/shm", shutil.disk_usage("/dev/shm").free >= 4 << 30)
def test_arrays_that_are_kept_beyond_a_gibibyte_share_a_mapping() -> None:
    """And one descriptor, of /proc/self/pagemap."""
    with small_pool(2048) as (writer, reader):
        writer.enqueue(np.zeros(1030 * MIB, np.uint8))
        kept = [reader.dequeue()]
        before = holdings("memlane-")
        for number in range(20):
            writer.enqueue(numbered(number))
            kept.append(reader.dequeue())
        assert all(map(is_lent, kept))
        assert all((array == number).all() for number, array in enumerate(kept[1:]))
        assert len(surplus(before, holdings("memlane-"))) <= 2


def test_messages_that_grow() -> None:
    """Space left by a smaller message is merged with its neighbours for a larger one."""
    with small_pool(64) as (writer, reader):
        writer.enqueue(numbered(1, 40 * MIB))
        assert is_lent(reader.dequeue())
        for number in (2, 3):
            writer.enqueue(numbered(number, 60 * MIB))
            array = reader.dequeue()
            assert is_lent(array)
            assert (array == number).all()
            del array


def test_kept_arrays_keep_no_descriptor_of_a_queue_that_has_ended() -> None:
    """Whichever end leaves last, nothing but the array's own mapping is left of the segment."""
    for is_reader_first in (True, False):
        with MessageQueue(1, 1) as writer:
            reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
            writer.wait_until_ready(PATIENCE)
            writer.enqueue(np.ones(2 << 20, np.uint8))
            kept = reader.dequeue()
            if is_reader_first:
                reader.close()
        reader.close()
        assert not [one for one in testing.segments() if os.getpid() in one.pids]
        assert kept.all()
        del kept
