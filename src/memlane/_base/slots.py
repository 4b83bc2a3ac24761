"""A participant's slot in a segment, decoded; whether its process lives; and the facts for blame.

The bytes come from the segment of an end of this process, or from a file that is looked at.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

from memlane._base import processes
from memlane._base.blame import Activity, Facts

State = Literal["absent", "running", "stopped", "dead", "closed", "unknown"]
Presence = Literal["absent", "attached", "dead", "closed", "unknown"]
"""The state that slot and lock show together: `dead` is attached without its lock."""

SLOT = struct.Struct("<IIQQQQ4xIQQQqIIQQQqq")
PEER = struct.Struct("<III4x64s96s80s")
VIEWS = (1 << 30) - 1  # the bits above mark what has survived an end
_ACTIVITIES: dict[int, Activity] = {
    0: "elsewhere",
    1: "waiting",
    2: "attaching",
    3: "in_block",
    4: "copying",
    5: "decoding",
}
ATTACHED = 1
_PRESENCES: dict[int, Presence] = {0: "absent", 1: "attached", 2: "closed", 3: "closed"}


class Slot(NamedTuple):
    """A slot's numbers as they stand in memory, and what some of them mean.

    Times are in nanoseconds of CLOCK_MONOTONIC; 0: none.
    """

    state: int
    rank_plus_1: int
    pid: int
    start_ticks: int
    pid_namespace: int
    skipped: int  # messages that a reader of the latest did not get
    absent_elsewhere: int  # of the writer
    leased_bytes: int
    first_plus_1: int  # position of its first message, if that is not the ring's
    position: int
    last_progress: int
    activity_code: int
    views_and_marks: int
    bytes: int
    waits: int
    extents: int
    views_since: int
    activity_since: int

    @property
    def presence(self) -> Presence:
        """The state that the slot alone shows: only the lock tells whether an attached one is
        dead."""
        return _PRESENCES.get(self.state, "unknown")

    @property
    def rank(self) -> int | None:
        """The rank of its participant, if it has one."""
        return self.rank_plus_1 - 1 if self.rank_plus_1 else None

    @property
    def activity(self) -> Activity:
        """Its participant's current call in memlane."""
        return _ACTIVITIES.get(self.activity_code, "unknown")

    @property
    def views(self) -> int:
        """Messages or objects that it keeps for views."""
        return self.views_and_marks & VIEWS

    def taken(self, has_late_readers: bool) -> int:
        """Messages that a reader has taken; a late one begins where the writer counts it."""
        if not self.first_plus_1:
            return 0 if has_late_readers else max(0, self.position - self.skipped)
        return max(0, self.position - (self.first_plus_1 - 1) - self.skipped)


NO_SLOT = Slot(*(0,) * 18)


class PeerFacts(NamedTuple):
    """Facts about a remote participant for which a slot has no room. Texts are UTF-8, and end at
    the first zero."""

    is_remote: int
    is_in_the_way: int
    condition: int  # 1: its connection is lost; 2: it is dead
    address: bytes
    doing: bytes
    more: bytes

    def pack(self) -> bytes:
        """Its bytes in a segment; longer texts are cut."""
        return PEER.pack(*self)


def text_in(field: bytes) -> str:
    """The text in a field, which may hold anything."""
    return field.partition(b"\0")[0].decode(errors="replace")


def packed(slot: Slot) -> bytes:
    """Its bytes in a segment."""
    return SLOT.pack(*slot)


def slots_in(data: bytes) -> list[Slot]:
    """Decodes the slots of all participants, 128 bytes each."""
    return list(map(Slot._make, SLOT.iter_unpack(data)))


def own_pid_namespace() -> int:
    """The inode of this process's pid namespace; 0 without /proc."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


Status = Callable[[int], tuple[processes.State, int | None]]


def state_of(
    slot: Slot, presence: Presence, namespace: int, status: Status = processes.status
) -> State:
    """The lock decides who lives; /proc says only whether that process runs.

    Args:
        namespace: the caller's, as pids of another mean nothing here.
    """
    if presence != "attached":
        return presence
    if slot.pid_namespace not in (0, namespace):
        return "unknown"
    state, start_ticks = status(slot.pid)
    return "unknown" if start_ticks != slot.start_ticks or state == "dead" else state


class Seen(NamedTuple):
    """A participant as an end of the same segment sees it, at a moment in nanoseconds."""

    slot: Slot
    state: State
    at: int
    namespace: int

    @property
    def is_of_here(self) -> bool:
        """True if its pid is of this pid namespace; in another it is another process."""
        return self.slot.pid_namespace in (0, self.namespace)

    @property
    def last_progress(self) -> str:
        """Returns how long ago it last published, consumed or attached, as text."""
        return f"last progress {(self.at - self.slot.last_progress) / 1e9:.1f} s ago"


def seen(presence: str, data: bytes, at: int) -> Seen:
    """A participant, from what the native ends return of it."""
    (slot,), namespace = slots_in(data), own_pid_namespace()
    return Seen(slot, state_of(slot, cast("Presence", presence), namespace), at, namespace)


def facts_of(name: str, state: State, pid: int | None, started: int, **more: Any) -> Facts:
    """The facts about a participant of this host, with what /proc says of its process now.

    Args:
        started: the clock tick of its start: a pid may be another process's by now, which is then
            neither looked at nor named.
        more: others of `Facts`.
    """
    if pid is None or state not in ("running", "stopped"):
        return Facts(name, state, pid, **more)
    condition = processes.condition(pid, started)
    if condition is None:
        return Facts(name, state, pid, **more)
    title = processes.name_of(pid)
    return Facts(name, condition.state, pid, title, doing=condition.words, **more)
