"""The error for a full storage; it names the processes that keep it full."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memlane._base.diagnosis import doing, participant
from memlane._base.naming import names_of
from memlane.errors import StoreFull

if TYPE_CHECKING:
    from memlane._native import StoreWriter
    from memlane.store.storage import SingleWriterShmObjectStorage


@dataclass(frozen=True)
class StoreBlocker:
    """A process that keeps the oldest object of a storage from being evicted.

    Attributes:
        rank: the reader's place, from 0; None for the writer itself.
        pid: None while absent.
        state: absent, running or stopped; unknown if /proc cannot say.
        owes: number of reads of that object that are outstanding.
        pins: number of its reads and views of that object that are in progress.
        last_progress: time of its last read, or of attaching, on the clock of `time.monotonic()`
            (seconds); None while absent.
    """

    rank: int | None
    pid: int | None
    state: str
    owes: int
    pins: int
    last_progress: float | None


def store_full(
    storage: SingleWriterShmObjectStorage, key: Hashable, need: int, is_obstructed: bool
) -> StoreFull:
    """The error for an object of `need` bytes: the oldest allocation of the ring cannot be freed.

    `is_obstructed`: the ring has room, or the table an entry, but an orphan there is still being
    read.
    """
    what = f"no room for {key!r}, {need} bytes"
    end, ring = storage._checked_writer(), storage.ring_buffer
    found = end.orphan_blockers() if is_obstructed else []
    oldest = ring.monotonic_id_start
    kept, kept_what = None, "cleared data"
    if not found and oldest in ring.metadata:
        if oldest not in storage.id_index:
            why = (
                f"the oldest allocation, id {oldest}, is not the storage's own; free_buf() may "
                f"free it"
            )
            return StoreFull(f"{what}: {why}", need, key)
        kept = storage.id_index[oldest]
        kept_what = f"the oldest object, {kept!r},"
        if oldest in storage._touched:
            why = f"{kept_what} is pinned by touch(); call release_touches()"
            return StoreFull(f"{what}: {why}", need, key, kept)
        found = end.blockers(oldest, min(storage.writer_flag.get(oldest, 0), 2**31 - 1))
    blockers = [_blocker(end, *one) for one in found]
    names = [name for _, name in blockers]
    who = names_of(names) if names else "a process that has just released it"
    culprits = tuple(blocker for blocker, _ in blockers)
    return StoreFull(f"{what}: {kept_what} is kept by {who}", need, key, kept, culprits)


def _blocker(end: StoreWriter, slot: int, owes: int, pins: int) -> tuple[StoreBlocker, str]:
    """The participant in `slot`, and its description."""
    who = participant(end, slot)
    is_absent = who.state == "absent"
    rank = None if slot == 0 else slot - 1
    pid, progress = (None, None) if is_absent else (who.pid, who.last_progress_ns / 1e9)
    parts = [] if is_absent else [f"pid {who.pid}", doing(who)]
    if owes:
        parts.append(f"has not read it {'yet' if owes == 1 else f'{owes} times'}")
    if pins and who.views:
        parts.append(f"reads it or holds a view of it, {who.held()}")
    parts.append("never attached" if is_absent else who.since())
    name = "the writer itself" if rank is None else f"reader {rank}"
    return StoreBlocker(rank, pid, who.state, owes, pins, progress), f"{name} ({', '.join(parts)})"
