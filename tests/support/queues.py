"""Queues for tests, in this process and in others."""

import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from memlane import Gather, Handle, MemlaneError, MessageQueue, ShmRingBuffer, TimedOut
from tests.support import PATIENCE, Link, Remote, serve, start

E = TypeVar("E", bound=BaseException)
SHM = Path("/dev/shm")
BOUND = 1.0
"""Seconds within which a death is noticed."""


@contextmanager
def queue_of(
    n_readers: int = 1, *, ready: bool = True, **options: Any
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """A writer and its readers, all in this process, until the end of the block."""
    options = {"max_chunk_bytes": 4096, "max_chunks": 4, **options}
    writer = MessageQueue(n_readers, n_readers, **options)
    ends = [writer]
    try:
        for rank in range(n_readers):
            ends.append(MessageQueue.create_from_handle(writer.export_handle(rank), rank))
        if ready:
            writer.wait_until_ready(PATIENCE)
        yield writer, ends[1:]
    finally:
        for end in reversed(ends):
            end.close()


@contextmanager
def ring_of(
    n_reader: int = 2, max_chunk_bytes: int = 64, max_chunks: int = 3
) -> Iterator[ShmRingBuffer]:
    """A ring used alone, until the end of the block."""
    ring = ShmRingBuffer(n_reader, max_chunk_bytes, max_chunks)
    try:
        yield ring
    finally:
        ring.close()


@contextmanager
def refuses(*kinds: type[E], match: str | None = None) -> Iterator["pytest.ExceptionInfo[E]"]:
    """Expects a memlane error that is also one of ``kinds``."""
    with pytest.raises(kinds, match=match) as caught:
        yield caught
    assert isinstance(caught.value, MemlaneError), repr(caught.value)


def segments() -> set[str]:
    """The names of all segments that exist now."""
    return {name for name in os.listdir(SHM) if name.startswith("memlane-")}


def sweep() -> None:
    """Creates a segment and closes it: creation sweeps what dead processes have left."""
    ShmRingBuffer(1, 1, 1).close()


def ring_in(end: MessageQueue) -> ShmRingBuffer:
    """The ring of an end that has one."""
    assert end.buffer is not None
    return end.buffer


def name_in(handle: Handle) -> str:
    """The name of a handle's segment."""
    assert handle.buffer_handle is not None
    return handle.buffer_handle[3]


def path_of(end: MessageQueue | ShmRingBuffer) -> Path:
    """The path of the segment, while it has its name."""
    return SHM / (name_in(end.handle) if isinstance(end, MessageQueue) else end.handle()[3])


def reading(link: Link, handle: Handle, rank: int) -> None:
    """Role: a reader that makes the requested calls."""
    serve(link, MessageQueue.create_from_handle(handle, rank))


def writing(link: Link, n_readers: int, options: dict[str, Any]) -> None:
    """Role: a writer that makes the requested calls; its greeting is the handle."""
    queue = MessageQueue(n_readers, n_readers, **options)
    serve(link, queue, queue.export_handle())


def start_reader(
    handle: Handle, rank: int = 0, method: str = "fork", command: Sequence[str] = (sys.executable,)
) -> Remote:
    """An attached reader in its own process."""
    return Remote(start(reading, handle, rank, method=method, command=command))


def start_writer(
    n_readers: int = 1,
    method: str = "fork",
    *,
    max_chunk_bytes: int = 4096,
    max_chunks: int = 4,
    late_readers: bool = False,
    mode: str = "all",
    command: Sequence[str] = (sys.executable,),
) -> Remote:
    """A writer in its own process; its handle is the ``greeting``."""
    options = {
        "max_chunk_bytes": max_chunk_bytes,
        "max_chunks": max_chunks,
        "late_readers": late_readers,
        "mode": mode,
    }
    return Remote(start(writing, n_readers, options, method=method, command=command))


def fill(writer: MessageQueue | Gather, first: int = 0) -> int:
    """Enqueues numbers until the ring is full; returns how many."""
    count = 0
    while True:
        try:
            writer.enqueue(first + count, timeout=0)
        except TimeoutError:
            return count
        count += 1


def drain(reader: MessageQueue) -> list[object]:
    """All messages available now."""
    messages: list[object] = []
    while True:
        try:
            messages.append(reader.dequeue(timeout=0))
        except TimeoutError:
            return messages


def file_of(queue: MessageQueue) -> os.stat_result:
    """The ring's file, found through a descriptor, as any process of this user can."""
    identity = queue.handle.queue_id
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if identity in os.readlink(entry):
                return entry.stat()
        except FileNotFoundError:
            continue
    raise AssertionError("no descriptor of the ring")


def flags(ring: ShmRingBuffer, chunk: int) -> list[int]:
    """The documented flags of one chunk: written, then one per reader."""
    with ring.get_metadata(chunk) as metadata:
        return list(metadata)


def set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def first_byte(queue: MessageQueue) -> int:
    with queue.acquire_read() as chunk:
        return int(chunk[0])


def failed(poll: Callable[..., object]) -> TimedOut:
    with refuses(TimedOut) as caught:
        poll(timeout=0)
    return caught.value


def reader_of(end: MessageQueue, rank: int) -> Any:
    """The entry of one reader."""
    (entry,) = [entry for entry in end.statistics().readers if entry.rank == rank]
    return entry
