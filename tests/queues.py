"""Queues for tests, in this process and in others."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytest

from memlane import Handle, MemlaneError, MessageQueue, ShmRingBuffer
from tests.harness import PATIENCE, Link, Remote, serve, start

E = TypeVar("E", bound=BaseException)
SHM = Path("/dev/shm")
BOUND = 1.0
"""Seconds within which a death is noticed."""


@contextmanager
def queue_of(
    n_readers: int = 1, *, max_chunk_bytes: int = 4096, max_chunks: int = 4, ready: bool = True
) -> Iterator[tuple[MessageQueue, list[MessageQueue]]]:
    """A writer and its readers, all in this process, closed afterwards."""
    writer = MessageQueue(
        n_readers, n_readers, max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks
    )
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
    """A ring that is used alone, closed afterwards."""
    ring = ShmRingBuffer(n_reader, max_chunk_bytes, max_chunks)
    try:
        yield ring
    finally:
        ring.close()


@contextmanager
def refuses(*kinds: type[E], match: str | None = None) -> Iterator["pytest.ExceptionInfo[E]"]:
    """An error of memlane that is one of ``kinds`` (builtins or memlane's own) too."""
    with pytest.raises(kinds, match=match) as caught:
        yield caught
    assert isinstance(caught.value, MemlaneError), repr(caught.value)


def segments() -> set[str]:
    """The names of all segments that exist now."""
    return {name for name in os.listdir(SHM) if name.startswith("memlane-")}


def sweep() -> None:
    """Create a segment and close it: creation sweeps what the dead have left."""
    ShmRingBuffer(1, 1, 1).close()


def ring_in(end: MessageQueue) -> ShmRingBuffer:
    """The ring of an end that has one."""
    assert end.buffer is not None
    return end.buffer


def name_in(handle: Handle) -> str:
    """The name of the segment to which a handle leads."""
    assert handle.buffer_handle is not None
    return handle.buffer_handle[3]


def path_of(end: MessageQueue | ShmRingBuffer) -> Path:
    """Where the segment has its name, as long as it has one."""
    return SHM / (name_in(end.handle) if isinstance(end, MessageQueue) else end.handle()[3])


def reading(link: Link, handle: Handle, rank: int) -> None:
    """Role: a reader that does what it is asked to do."""
    serve(link, MessageQueue.create_from_handle(handle, rank))


def writing(link: Link, n_readers: int, max_chunk_bytes: int, max_chunks: int) -> None:
    """Role: a writer that does what it is asked to do; its greeting is the handle."""
    queue = MessageQueue(
        n_readers, n_readers, max_chunk_bytes=max_chunk_bytes, max_chunks=max_chunks
    )
    serve(link, queue, queue.export_handle())


def start_reader(
    handle: Handle, rank: int = 0, method: str = "fork", command: Sequence[str] = (sys.executable,)
) -> Remote:
    """A reader in a process of its own, attached."""
    return Remote(start(reading, handle, rank, method=method, command=command))


def start_writer(
    n_readers: int = 1,
    method: str = "fork",
    *,
    max_chunk_bytes: int = 4096,
    max_chunks: int = 4,
    command: Sequence[str] = (sys.executable,),
) -> Remote:
    """A writer in a process of its own; its handle is the ``greeting``."""
    return Remote(
        start(writing, n_readers, max_chunk_bytes, max_chunks, method=method, command=command)
    )


def fill(writer: MessageQueue, first: int = 0) -> int:
    """Enqueue numbers until the ring is full; how many went in."""
    count = 0
    while True:
        try:
            writer.enqueue(first + count, timeout=0)
        except TimeoutError:
            return count
        count += 1


def drain(reader: MessageQueue) -> list[object]:
    """All messages that are there now."""
    messages: list[object] = []
    while True:
        try:
            messages.append(reader.dequeue(timeout=0))
        except TimeoutError:
            return messages


def file_of(queue: MessageQueue) -> os.stat_result:
    """The ring's file, found as any process of this user can: through a descriptor."""
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
