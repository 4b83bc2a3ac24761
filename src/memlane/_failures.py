"""How a native call that failed is told: one exception with everything known about the peers.

Called by the bindings only (`native/bindings/failures.hpp`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from memlane.errors import (
    Cancelled,
    Closed,
    ConcurrentUse,
    CorruptMessage,
    MemlaneError,
    ReaderDied,
    TimedOut,
    WriterDied,
    WrongProcess,
)


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
    def participants(self) -> list[tuple[str, int, int, int]]: ...


def participants_of(end: End) -> list[Participant]:
    """By slot: the writer first, then the readers by their place. Costs a few system calls."""
    return [Participant(*facts) for facts in end.participants()]


def failure(end: End, what: str, slot: int, timeout: float | None) -> MemlaneError:
    """The exception for `what` that happened to `end`; `slot` is the peer that it is about."""
    match what:
        case "closed":
            return Closed("this end is closed")
        case "wrong_process":
            return WrongProcess(
                "this object was opened by the process that forked this one; only close() may be "
                "called here. Make a new end in the child"
            )
        case "concurrent_use":
            return ConcurrentUse(
                "another call on this end is under way; one thread at a time may use it"
            )
        case "no_block":
            return ConcurrentUse("no block is open on this end")
        case "cancelled":
            return Cancelled()
        case "corrupt":
            return CorruptMessage(
                "the chunk does not hold an object that memlane wrote; it was skipped"
            )
        case "peer_closed":
            return Closed("the writer closed the queue, and everything it sent has been read")
        case "peer_died":
            return _death(end, slot)
        case "timed_out":
            waiting_for = _unread_by(end) if end.slot == 0 else _writer_of(end)
            return _timeout(timeout, waiting_for)
        case "not_ready":
            return _timeout(timeout, _absent_from(end))
        case _:
            raise ValueError(f"native code reported {what!r}, which has no exception")


def _death(end: End, slot: int) -> MemlaneError:
    who = participants_of(end)[slot]
    detail = f" after {who.position} messages, {who.since()}"
    if slot == 0:
        return WriterDied(who.pid, detail)
    return ReaderDied(end.ranks[slot - 1], who.pid, detail)


def _timeout(timeout: float | None, waiting_for: list[str]) -> TimedOut:
    names = f" waiting for {', '.join(waiting_for)}" if waiting_for else ""
    return TimedOut(f"gave up after {timeout} s{names}", timeout)


def _writer_of(end: End) -> list[str]:
    writer = participants_of(end)[0]
    return [f"the writer (pid {writer.pid}, {writer.state}, {writer.since()})"]


def _absent_from(end: End) -> list[str]:
    readers = participants_of(end)[1:]
    return [
        f"reader {rank} (never attached)"
        for rank, who in zip(end.ranks, readers, strict=True)
        if who.state == "absent"
    ]


def _unread_by(end: End) -> list[str]:
    writer, *readers = participants_of(end)
    behind = [
        f"reader {rank} (pid {who.pid}, {who.state}, {writer.position - who.position} behind, "
        f"{who.since()})"
        for rank, who in zip(end.ranks, readers, strict=True)
        if who.state not in ("absent", "closed") and who.position < writer.position
    ]
    return behind + _absent_from(end)
