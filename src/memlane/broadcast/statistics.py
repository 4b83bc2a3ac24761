"""Snapshots of a queue, read from the counters in its segment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ReaderState = Literal["absent", "running", "stopped", "dead", "closed", "unknown"]


@dataclass(frozen=True)
class ReaderStatistics:
    """One reader as the segment and the kernel see it.

    Attributes:
        rank: as in the handle.
        pid: None while absent.
        state: `closed` also for a place given up by `release_reader`; `unknown` where the reader
            lives but /proc cannot say whether it is stopped (another pid namespace).
        behind: messages that were published and that it has not taken yet.
        last_progress: time of its last message, or of attaching, on `time.monotonic()`'s clock
            (seconds); None while absent.
    """

    rank: int
    pid: int | None
    state: ReaderState
    behind: int
    last_progress: float | None


@dataclass(frozen=True)
class QueueStatistics:
    """One end of a queue, and all its readers.

    Attributes:
        role: of this end.
        rank: of this end, None for the writer.
        pid: of this process.
        messages: published by this writer, or taken by this reader.
        bytes: of those messages as encoded.
        waits: calls that did not find at once what they came for.
        readers: in the order of the handle's ranks.
    """

    role: Literal["writer", "reader"]
    rank: int | None
    pid: int
    messages: int
    bytes: int
    waits: int
    readers: tuple[ReaderStatistics, ...]
