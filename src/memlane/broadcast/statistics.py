"""The types of a queue's snapshots, and nothing else: each end fills in its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReaderState = Literal["absent", "running", "stopped", "dead", "closed", "unknown"]


@dataclass(frozen=True)
class ReaderStatistics:
    """One reader, as seen in the segment and by the kernel.

    Attributes:
        rank: as in the handle.
        pid: None while absent.
        state: `closed` also after `release_reader`; `unknown` if the reader is alive but /proc
            cannot say whether it is stopped (another pid namespace). On another host `running`
            means connected, stopped or not, and `unknown` that the connection is lost.
        behind: number of published messages that it has yet to take; of the latest at most 1.
        last_progress: time of its last message, or of attaching or closing, on the clock of
            `time.monotonic()` (seconds); None while absent.
        is_waiting: it is blocked in a call, waiting for the next message.
        views: number of messages that it keeps for views.
        views_since: time at which it took the oldest of them, on the same clock, or None.
        address: `host:port` of a reader on another host, else None.
        skipped: with `mode="latest"`, number of messages that it did not get, because it took a
            later one.
        lent: bytes that cannot be reused because of its arrays and views: chunks, whole, and
            extents. Those of a reader that has closed are its own until it drops them.
    """

    rank: int
    pid: int | None
    state: ReaderState
    behind: int
    last_progress: float | None
    is_waiting: bool
    views: int
    views_since: float | None
    address: str | None = None
    skipped: int = 0
    lent: int = 0


@dataclass(frozen=True)
class QueueStatistics:
    """One end of a queue, and all its readers.

    Attributes:
        role: of this process.
        rank: of this process; None for the writer.
        pid: of this process.
        messages: number published by this writer, or taken by this reader.
        bytes: of those messages, as encoded.
        waits: number of calls that had to wait.
        spills: number of messages of this writer that did not fit a chunk.
        readers: all readers, in the order of the handle's ranks.
        skipped: of this reader, as in `readers`; of the writer 0.
    """

    role: Literal["writer", "reader"]
    rank: int | None
    pid: int
    messages: int
    bytes: int
    waits: int
    spills: int
    readers: tuple[ReaderStatistics, ...]
    skipped: int = 0


@dataclass(frozen=True)
class WriterStatistics:
    """One writer of a gather, as its reader sees it.

    Attributes:
        rank: as in its handle.
        pid: None while absent, and once its ring has ended.
        state: as of a reader; `closed` also after `release_writer`.
        behind: number of its messages that were not taken yet.
        taken: number of those that were, of this process; 0 once its ring has ended.
    """

    rank: int
    pid: int | None
    state: ReaderState
    behind: int
    taken: int


@dataclass(frozen=True)
class GatherStatistics:
    """One process of a gather.

    Attributes:
        pid: of this process.
        messages: number sent by this writer, or taken by the reader.
        bytes: of those messages, as encoded.
        waits: number of calls of this writer that had to wait, or of the reader that had to sleep.
        writers: in the reader, all writers by rank; in a writer none.
    """

    pid: int
    messages: int
    bytes: int
    waits: int
    writers: tuple[WriterStatistics, ...]
