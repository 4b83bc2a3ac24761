"""How a native call that failed is told: one exception with everything known about the peers.

Called by the bindings only (`native/bindings/failures.hpp`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from memlane.errors import (
    Cancelled,
    Closed,
    ConcurrentUse,
    CorruptMessage,
    MemlaneError,
    ReaderDied,
    TimedOut,
    ViewInUse,
    WriterClosed,
    WriterDied,
    WrongProcess,
)

if TYPE_CHECKING:
    from memlane._native import RingWriter


class Participant(NamedTuple):
    """What a slot says of a process; `last_progress_ns` counts on the monotonic clock."""

    # absent, running, stopped, dead, closed; or unknown: alive, but /proc cannot say more
    state: str
    pid: int
    position: int
    last_progress_ns: int

    def since(self) -> str:
        """How long ago it last published, consumed or attached."""
        return f"last progress {(time.monotonic_ns() - self.last_progress_ns) / 1e9:.1f} s ago"


class End(Protocol):
    """What the native ends of all systems can tell about themselves."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    def participant(self, slot: int) -> tuple[str, int, int, int]: ...


# A text names so many of those it is about, and counts the rest.
MOST_NAMED = 8

_TEXTS: dict[str, tuple[type[MemlaneError], str]] = {
    "closed": (Closed, "this end is closed"),
    "writer_closed": (
        WriterClosed,
        "the writer closed the queue, and everything it sent has been read",
    ),
    "writer_left": (Closed, "the writer closed the queue before everybody had attached"),
    "wrong_process": (
        WrongProcess,
        "this object was opened by the process that forked this one; only close() may be called "
        "here. Make a new end in the child",
    ),
    "concurrent_use": (
        ConcurrentUse,
        "another call on this end is under way; one thread at a time may use it",
    ),
    "block_open": (
        ConcurrentUse,
        "a block of acquire_write or acquire_read is open on this end; leave it first",
    ),
    "no_block_open": (ConcurrentUse, "no block is open on this end"),
    "corrupt": (
        CorruptMessage,
        "the chunk does not hold an object that memlane wrote; it was skipped",
    ),
    "write_view_in_use": (
        ViewInUse,
        "something still refers to the chunk at the end of its block and could change the message "
        "later; nothing was published",
    ),
    "read_view_in_use": (
        ViewInUse,
        "something still refers to the chunk at the end of its block; the chunk is given back when "
        "that goes, and the writer waits for it",
    ),
    "next_chunk_held": (
        ViewInUse,
        "the next message comes through a chunk that something of this reader still refers to; "
        "drop it first",
    ),
}


def participant(end: End, slot: int) -> Participant:
    """Slot 0 is the writer, slot 1 + place a reader. A few system calls."""
    return Participant(*end.participant(slot))


def failure(end: End, what: str, slot: int, timeout: float | None) -> MemlaneError:
    """The exception for `what` that happened to `end`; `slot` is the peer that it is about."""
    match what:
        case "cancelled":
            return Cancelled()
        case "peer_died":
            return _death(end, slot)
        case "timed_out":
            return _timeout(timeout, [_writer_of(end)] if end.slot else _blocking(end))
        case "not_ready":
            return _timeout(timeout, _absent_from(end))
    kind, text = _TEXTS[what]
    return kind(text)


def _death(end: End, slot: int) -> MemlaneError:
    who = participant(end, slot)
    detail = f" after {who.position} messages, {who.since()}"
    if slot == 0:
        return WriterDied(who.pid, detail)
    if end.slot == 0:
        rank = end.ranks[slot - 1]
        detail += f"; release_reader({rank}) goes on without it"
    return ReaderDied(end.ranks[slot - 1], who.pid, detail)


def _timeout(timeout: float | None, waiting_for: list[str]) -> TimedOut:
    named = ", ".join(waiting_for[:MOST_NAMED])
    more = f" and {len(waiting_for) - MOST_NAMED} more" if len(waiting_for) > MOST_NAMED else ""
    names = f" waiting for {named}{more}" if waiting_for else ""
    return TimedOut(f"gave up after {timeout} s{names}", timeout)


def _writer_of(end: End) -> str:
    writer = participant(end, 0)
    return f"the writer (pid {writer.pid}, {writer.state}, {writer.since()})"


def _absent_from(end: End) -> list[str]:
    return [
        f"reader {rank} (never attached)"
        for slot, rank in enumerate(end.ranks, start=1)
        if participant(end, slot).state == "absent"
    ]


def _blocking(end: End) -> list[str]:
    """The readers that a writer waits for."""
    sent = participant(end, 0).position
    slots = cast("RingWriter", end).blocking_slots()
    return [_behind(end, slot, sent) for slot in slots[:MOST_NAMED]] + [""] * (
        len(slots) - MOST_NAMED
    )


def _behind(end: End, slot: int, sent: int) -> str:
    who, rank = participant(end, slot), end.ranks[slot - 1]
    if who.state == "absent":
        return f"reader {rank} (never attached)"
    behind = sent - who.position
    return f"reader {rank} (pid {who.pid}, {who.state}, {behind} behind, {who.since()})"
