"""References that outlive a block on a chunk filled or read by hand are found, of whatever kind.

Fails without the guard: releasing a memoryview says nothing about its slices, casts and arrays.
"""

import ctypes
import struct
from collections.abc import Callable
from pickle import PickleBuffer

import numpy as np
import pytest

from memlane import ViewInUse
from tests.support.queues import queue_of, refuses

pytestmark = [pytest.mark.wheel, pytest.mark.unit]

KEEPERS: dict[str, Callable[[memoryview], object]] = {
    "slice": lambda view: view[:5],
    "cast": lambda view: view.cast("I"),
    "view of the view": memoryview,
    "array": lambda view: np.frombuffer(view, np.uint8),
    "ctypes": lambda view: (ctypes.c_char * 8).from_buffer(view),
    "iterator": lambda view: struct.iter_unpack("B", view),
    "pickle buffer": PickleBuffer,
}
keepers = pytest.mark.parametrize("keep", KEEPERS.values(), ids=KEEPERS)


@keepers
def test_a_write_whose_view_survives_publishes_nothing(
    keep: Callable[[memoryview], object],
) -> None:
    """Nothing is published while a reference could still change it; then the queue works again."""
    with queue_of(max_chunk_bytes=64, max_chunks=2) as (writer, (reader,)):
        kept: list[object] = []
        with refuses(BufferError) as caught, writer.acquire_write() as view:
            kept.append(keep(view))
            del view
        assert isinstance(caught.value, ViewInUse)
        with refuses(TimeoutError):
            reader.dequeue(timeout=0)
        with refuses(ViewInUse):  # it would change this one
            writer.enqueue("too early")
        kept.clear()
        del caught
        writer.enqueue("next")
        assert reader.dequeue() == "next"


@keepers
def test_a_read_whose_view_survives_keeps_the_chunk(keep: Callable[[memoryview], object]) -> None:
    """The chunk does not change until the last reference goes; then the writer gets it."""
    with queue_of(max_chunk_bytes=64, max_chunks=1) as (writer, (reader,)):
        with writer.acquire_write() as view:
            view[:5] = b"first"
        kept: list[object] = []
        with refuses(BufferError) as caught, reader.acquire_read() as view:
            kept.append(keep(view))
            del view
        assert isinstance(caught.value, ViewInUse)
        with refuses(TimeoutError):
            writer.enqueue("second", timeout=0.02)
        with refuses(ViewInUse):  # the message that it would see is the one it has
            reader.dequeue(timeout=0)
        kept.clear()
        del caught
        writer.enqueue("second")
        assert reader.dequeue() == "second"


def keep_and_fail(kept: list[object], view: memoryview) -> None:
    kept.append(view[:3])
    raise ZeroDivisionError


def test_the_error_of_the_block_wins() -> None:
    """An exception in the block is raised, whatever references remain."""
    with queue_of(max_chunk_bytes=64, max_chunks=2) as (writer, (reader,)):
        writer.enqueue(1)
        kept: list[object] = []
        for block in (reader.acquire_read(), writer.acquire_write()):
            with pytest.raises(ZeroDivisionError), block as view:
                keep_and_fail(kept, view)
            kept.clear()


def test_a_block_keeps_its_queue() -> None:
    """A queue that only its block refers to lives as long as the block."""
    from memlane import MessageQueue

    with MessageQueue(1, 1, max_chunk_bytes=64) as writer:
        writer.enqueue(1)
        handle = writer.export_handle()
        with MessageQueue.create_from_handle(handle, 0).acquire_read() as view:
            assert len(view) == 64
