"""M12: close() while views are still exported; only the memory outlives it.

Fails without the guard: a lock on the mapped descriptor lives as long as the last view, and a
close that unmaps makes the view crash.
"""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from memlane import Closed, MessageQueue, ReaderDied, ShmRingBuffer, WriterDied
from tests.support import Aside, holdings, surplus
from tests.support.queues import (
    fill,
    path_of,
    queue_of,
    refuses,
    ring_in,
    start_reader,
    start_writer,
    sweep,
)


def from_buf(ring: ShmRingBuffer) -> memoryview:
    return ring.shared_memory.buf[:8]


def from_array(ring: ShmRingBuffer) -> Any:
    return np.frombuffer(ring.shared_memory.buf, np.uint8)[:8]


def from_get_data(ring: ShmRingBuffer) -> Any:
    with suppress(BufferError), ring.get_data(0) as data:
        alias = np.frombuffer(data, np.uint8)[:8]
    return alias


EXPORTS = [from_buf, from_array, from_get_data]
exports = pytest.mark.parametrize("export", EXPORTS)


@exports
def test_a_ring_with_a_view_closes(export: Callable[[ShmRingBuffer], Any]) -> None:
    """close() succeeds, name and descriptors go at once, the mapping with the last view."""
    before = holdings("memlane-")
    ring = ShmRingBuffer(2, 64, 3)
    with ring.get_data(0) as data:
        data[:5] = b"alive"
    view = export(ring)
    ring.close()
    ring.close()
    assert not path_of_name(ring.handle()[3])
    left = surplus(before, holdings("memlane-"))
    assert not [line for line in left if not line.startswith("mappings")], left
    assert bytes(view[:5]) == b"alive"
    view[0] = ord("A")
    assert bytes(view[:5]) == b"Alive"
    del ring
    gc.collect()
    assert bytes(view[:5]) == b"Alive"
    del view
    gc.collect()
    assert not surplus(before, holdings("memlane-"))


def path_of_name(name: str) -> list[str]:
    return [found for found in holdings("memlane-").segments if found == name]


@exports
@pytest.mark.parametrize("role", ["writer", "reader"])
def test_a_queue_with_a_view_closes(export: Callable[[ShmRingBuffer], Any], role: str) -> None:
    """A queue's close is announced at once, though a view of its ring lives on."""
    with queue_of(1, max_chunks=2) as (writer, (reader,)):
        writer.enqueue("complete")
        if role == "writer":
            view = export(ring_in(writer))
            writer.close()
            assert reader.dequeue() == "complete"
            with refuses(Closed):
                reader.dequeue()
        else:
            view = export(ring_in(reader))
            reader.close()
            for number in range(10):
                writer.enqueue(number, timeout=0)
        assert len(bytes(view)) == 8


class Trouble(Exception):
    pass


def drop(end: MessageQueue) -> None:
    """Leave a with block by an exception: everything is freed, nothing announced."""
    with suppress(Trouble), end:
        raise Trouble


@exports
def test_the_lock_of_a_writer_goes_at_once(export: Callable[[ShmRingBuffer], Any]) -> None:
    """A reader in another process sees the death, while this process lives and has a view."""
    writer = MessageQueue(1, 1, None, 256, 2)
    path = path_of(writer)
    reader = start_reader(writer.export_handle())
    reader.begin("dequeue").until_blocked()
    view = export(ring_in(writer))
    drop(writer)
    assert not path.exists()
    with refuses(WriterDied):
        reader.outcome()
    assert len(bytes(view)) == 8


@exports
def test_the_lock_of_a_reader_goes_at_once(export: Callable[[ShmRingBuffer], Any]) -> None:
    """A writer in another process sees the death, while this process lives and has a view."""
    writer = start_writer(1, max_chunks=2)
    reader = MessageQueue.create_from_handle(writer.greeting, 0)
    writer.call(fill)
    writer.begin("enqueue", "never").until_blocked()
    view = export(ring_in(reader))
    drop(reader)
    with refuses(ReaderDied):
        writer.outcome()
    assert len(bytes(view)) == 8
    writer.call("close")


@exports
def test_dropping_a_queue_that_has_a_view(export: Callable[[ShmRingBuffer], Any]) -> None:
    """A view does not keep the queue itself alive: without a reference to it it is dead."""
    reader_in = start_writer(1, max_chunks=2)
    reader = MessageQueue.create_from_handle(reader_in.greeting, 0)
    view = export(ring_in(reader))
    reader_in.call(fill)
    reader_in.begin("enqueue", "never").until_blocked()
    del reader
    gc.collect()
    with refuses(ReaderDied):
        reader_in.outcome()
    assert len(bytes(view)) == 8
    reader_in.call("close")


@pytest.mark.parametrize("role", ["writer", "reader"])
def test_a_close_inside_a_block_succeeds(role: str) -> None:
    """close() while a chunk is held succeeds, and the chunk can be looked at until it is left."""
    with queue_of(1) as (writer, (reader,)):
        end = writer if role == "writer" else reader
        if role == "reader":
            writer.enqueue("needle")
        with (
            suppress(RuntimeError),
            end.acquire_write() if role == "writer" else (end.acquire_read()) as chunk,
        ):
            if role == "writer":
                chunk[:6] = b"needle"
            end.close()
            assert b"needle" in bytes(chunk)
        if role == "writer":
            with refuses(Closed):  # what was not complete was not announced
                reader.dequeue(timeout=0)


def read_all(reader: MessageQueue) -> list[str]:
    return list(reader)


def test_closes_with_many_views_disturb_no_other_thread() -> None:
    """Many closes with many views alive do not disturb each other."""
    ends = [queue_of(1, max_chunk_bytes=4096) for _ in range(10)]
    views = []
    for end in ends:
        with end as (writer, (reader,)):
            writer.enqueue("x")
            views += [from_buf(ring_in(writer)), from_buf(ring_in(reader))]
            waits: Aside[list[str]] = Aside(read_all, reader)
            writer.close()
            assert waits.result() == ["x"]
    assert [len(bytes(view)) for view in views] == [8] * 20
    views.clear()
    sweep()
