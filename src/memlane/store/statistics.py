"""Snapshots of a storage, read from the counters in its segment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memlane._failures import participant

if TYPE_CHECKING:
    from memlane._native import StoreReader, StoreWriter


@dataclass(frozen=True)
class StoreReaderStatistics:
    """One reader of a storage, as the segment and the kernel see it.

    Attributes:
        rank: its place among the readers, from 0.
        pid: None while absent.
        state: absent, running, stopped, dead, closed; `unknown` where the reader lives but /proc
            cannot say whether it is stopped (another pid namespace).
        reads: gets and views of this process.
        outstanding: reads that it still owes, of what is stored now; closed and dead ones are
            not waited for.
        last_progress: time of its last read, or of attaching, on `time.monotonic()`'s clock
            (seconds); None while absent.
        views: objects that it keeps from eviction.
        views_since: since when it keeps the oldest of them, on the same clock; None without any.
    """

    rank: int
    pid: int | None
    state: str
    reads: int
    outstanding: int
    last_progress: float | None
    views: int
    views_since: float | None


@dataclass(frozen=True)
class StoreStatistics:
    """A storage, as one of its ends sees it.

    Attributes:
        role: of this end.
        rank: of this end, None for the writer.
        pid: of this process.
        writer_pid: of the writer.
        writer_state: running, stopped, dead, closed or unknown.
        puts: objects stored since the beginning.
        hits: references beyond the first (`get_cached`).
        evictions: objects that made room.
        objects: stored now, of at most `max_objects`.
        bytes: of these: read counts, metadata and data.
        readers: by rank.
    """

    role: Literal["writer", "reader"]
    rank: int | None
    pid: int
    writer_pid: int
    writer_state: str
    puts: int
    hits: int
    evictions: int
    objects: int
    max_objects: int
    bytes: int
    readers: tuple[StoreReaderStatistics, ...]


def store_statistics(end: StoreWriter | StoreReader) -> StoreStatistics:
    """What one end sees now: some system calls per reader, and a look at the whole table."""
    max_objects, puts, hits, evictions, objects, size = end.counters()
    writer = participant(end, 0)
    return StoreStatistics(
        role="writer" if end.slot == 0 else "reader",
        rank=end.slot - 1 if end.slot else None,
        pid=os.getpid(),
        writer_pid=writer.pid,
        writer_state=writer.state,
        puts=puts,
        hits=hits,
        evictions=evictions,
        objects=objects,
        max_objects=max_objects,
        bytes=size,
        readers=tuple(
            _reader_statistics(end, rank, outstanding)
            for rank, outstanding in enumerate(end.outstanding())
        ),
    )


def _reader_statistics(
    end: StoreWriter | StoreReader, rank: int, outstanding: int
) -> StoreReaderStatistics:
    who = participant(end, 1 + rank)
    was_here = who.pid != 0
    return StoreReaderStatistics(
        rank=rank,
        pid=who.pid if was_here else None,
        state=who.state,
        reads=who.position,
        outstanding=0 if who.state in ("closed", "dead") else outstanding,
        last_progress=who.last_progress_ns / 1e9 if was_here else None,
        views=who.views,
        views_since=who.views_since_ns / 1e9 if who.views else None,
    )
