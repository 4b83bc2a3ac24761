"""Snapshots of a storage, read from the counters in its segment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from memlane._base.diagnosis import participant

if TYPE_CHECKING:
    from memlane._native import StoreReader, StoreWriter


@dataclass(frozen=True)
class StoreReaderStatistics:
    """One reader of a storage, as the segment and the kernel see it.

    Attributes:
        rank: its place among the readers, from 0.
        pid: None while absent.
        state: absent, running, stopped, dead or closed; unknown if the reader is alive but /proc
            cannot say whether it is stopped (another pid namespace).
        reads: number of gets and views by this process.
        outstanding: number of reads of stored objects that it still has to make; 0 if it is closed
            or dead.
        last_progress: time of its last read, or of attaching, on the clock of `time.monotonic()`
            (seconds); None while absent.
        views: number of objects that it keeps from eviction.
        views_since: time when it took the oldest of them, on the same clock; None without views.
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
        role: of this process.
        rank: of this process; None for the writer.
        pid: of this process.
        writer_pid: of the writer.
        writer_state: running, stopped, dead, closed or unknown.
        puts: number of objects stored so far.
        hits: number of references beyond the first (`get_cached`).
        evictions: number of objects evicted to make room.
        objects: number of objects stored now.
        max_objects: the most that can be stored at once.
        bytes: of the stored objects: read counts, metadata and data.
        readers: all readers, by rank.
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
    """Returns what one end sees now; makes a few system calls per reader, and reads the whole
    table."""
    max_objects, puts, hits, evictions, objects, size = end.counters()
    writer = participant(end, 0)
    return StoreStatistics(
        role="writer" if end.slot == 0 else "reader",
        rank=end.slot - 1 if end.slot else None,
        pid=os.getpid(),
        writer_pid=writer.slot.pid,
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
    slot, was_here = who.slot, who.slot.pid != 0
    return StoreReaderStatistics(
        rank=rank,
        pid=slot.pid if was_here else None,
        state=who.state,
        reads=slot.position,
        outstanding=0 if who.state in ("closed", "dead") else outstanding,
        last_progress=slot.last_progress / 1e9 if was_here else None,
        views=slot.views,
        views_since=slot.views_since / 1e9 if slot.views else None,
    )
