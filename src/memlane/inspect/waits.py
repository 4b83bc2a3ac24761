"""Who waits for whom: decided from one look at the segments, at a given moment."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from memlane.errors import InvalidArgument
from memlane.inspect import layout
from memlane.inspect.layout import Unreadable
from memlane.inspect.segment import Known, Participant, Segment, files, look, opened

Reason = Literal[
    "no free chunk", "no space for a large message", "no new message", "not all attached"
]


@dataclass(frozen=True)
class Wait:
    """A writer or reader of a queue that has waited for long.

    Attributes:
        segment: its name.
        waiter: who waits.
        seconds: for how long.
        reason: what for.
        awaited: for whom; the likeliest cause first.
        absent_elsewhere: awaited readers on other hosts, which have no slot here.
        advice: what to do, in one sentence.
    """

    segment: str
    waiter: Participant
    seconds: float
    reason: Reason
    awaited: tuple[Participant, ...]
    absent_elsewhere: int
    advice: str

    @property
    def is_in_turn(self) -> bool:
        """A reader that waits for its writer, which waits itself: another wait names the cause."""
        return self.reason == "no new message" and self.awaited[0].activity == "waiting"


def stuck(after: float = 1.0) -> list[Wait]:
    """Every writer or reader of this user's queues that waits for longer than `after` seconds for
    somebody else. A reader of an idle queue is not stuck; one of a stopped writer is.

    One look: the segments say since when a wait lasts.

    Raises:
        InvalidArgument: `after` is negative or not a number.
        SystemFault: as `segments`.
    """
    if isinstance(after, bool) or not isinstance(after, (int, float)) or not after >= 0:
        raise InvalidArgument(f"after must be a number of seconds, not {after!r}")
    found: list[Wait] = []
    known = Known()
    for candidate in files():
        with opened(candidate) as file:
            if file is not None and (segment := look(file, candidate, known)) is not None:
                found += waits_of(file, segment, known, after)
    return sorted(found, key=lambda wait: -wait.seconds)


def waits_of(file: int, segment: Segment, known: Known, after: float) -> list[Wait]:
    """Those in the segment that the file is."""
    if segment.kind != "queue":
        return []
    unread: set[int] = set()
    with suppress(Unreadable):  # it was given up meanwhile
        header = known.header_of(file)
        if header is not None and segment.mode == "all":  # of the latest nobody waits to be read
            written, read = layout.flags_of(file, header, segment.participants[0].position)
            unread = {number for number, is_read in enumerate(read) if written and not is_read}
    return waits_in(segment, unread, after, time.monotonic())


def waits_in(segment: Segment, unread: Iterable[int], after: float, now: float) -> list[Wait]:
    """The waits in a queue's segment that have lasted for more than `after` seconds.

    Args:
        unread: numbers of the readers that have not read the chunk that the writer needs next.
    """
    writer, *readers = segment.participants
    blocking = [readers[number] for number in unread if readers[number].state != "closed"]
    waits = []
    for who in segment.participants:
        if who.state in ("absent", "closed", "dead") or who.activity_since is None:
            continue
        seconds = now - who.activity_since
        if seconds < after:
            continue
        seen = _reason(who, writer, readers, blocking, segment.absent_elsewhere)
        if seen is None:
            continue
        reason, awaited = seen
        awaited = sorted(awaited, key=_likeliness)
        elsewhere = segment.absent_elsewhere if reason == "not all attached" else 0
        waits.append(
            Wait(segment.name, who, seconds, reason, tuple(awaited), elsewhere, _advice(awaited))
        )
    return waits


def _reason(
    who: Participant,
    writer: Participant,
    readers: Sequence[Participant],
    blocking: Sequence[Participant],
    elsewhere: int,
) -> tuple[Reason, list[Participant]] | None:
    """What `who` waits for, and for whom; None if nobody keeps it waiting."""
    if who.activity == "attaching":
        absent = [other for other in (writer, *readers) if other.state == "absent"]
        return ("not all attached", absent) if absent or elsewhere else None
    if who.activity != "waiting":
        return None
    if who is writer:
        if blocking:
            return "no free chunk", list(blocking)
        behind = [reader for reader in readers if reader.behind or reader.views]
        return ("no space for a large message", behind) if behind else None
    # A reader of an idle writer waits for nobody. One whose message is there is about to take it.
    if who.behind or (writer.state == "running" and writer.activity != "waiting"):
        return None
    return "no new message", [writer]


def _likeliness(who: Participant) -> tuple[int, float]:
    """The likeliest cause first: who cannot run, then who keeps views, then the longest silent."""
    order = {"dead": 0, "stopped": 1, "absent": 2}.get(who.state, 4 - (who.views > 0))
    return order, who.last_progress or 0.0


def _advice(awaited: Sequence[Participant]) -> str:
    if not awaited:
        return "Look at the hosts of the readers that have not attached."
    who = awaited[0]
    match who.state:
        case "dead":
            return f"Process {who.pid} has died; its peers will name it within a second."
        case "stopped":
            return f"Process {who.pid} is stopped: `kill -CONT {who.pid}` resumes it."
        case "absent":
            return "Was its process started, and did it call create_from_handle with this rank?"
        case "unknown":
            return f"Process {who.pid} is in another container: look at it from there."
    if who.activity in ("waiting", "attaching"):
        return f"Process {who.pid} waits itself: its own line names the cause."
    if who.activity == "in_block":
        return f"Process {who.pid} is inside acquire_read or acquire_write and must leave it."
    if who.views:
        return f"Process {who.pid} keeps views of {who.views} chunks: it must drop or copy them."
    return f"Process {who.pid} computes, or is blocked elsewhere: its stack says where."


def headline(wait: Wait, segment: str, title: str) -> str:
    """Who waits in that segment, for how long and what for; `title` is of the waiter's process."""
    who = wait.waiter
    name = who.role if who.rank is None else f"{who.role} {who.rank}"
    return (
        f"{name} (pid {f'{who.pid} {title}'.rstrip()}) of {segment} blocked for "
        f"{wait.seconds:.1f} s: {wait.reason}"
    )


def describe(who: Participant, now: float, title: str = "") -> str:
    """One participant in words: `reader 2 (pid 9 serve.py, stopped, 10 behind, last progress 5.0 s
    ago)`."""
    name = who.role if who.rank is None else f"{who.role} {who.rank}"
    if who.pid is None:
        return f"{name} (never attached)"
    words = [f"pid {who.pid} {title}".rstrip(), who.state]
    if who.behind:
        words.append(f"{who.behind} behind")
    if who.views:
        words.append(f"keeps {who.views} views")
    if who.last_progress is not None and who.state != "closed":
        words.append(f"last progress {max(0.0, now - who.last_progress):.1f} s ago")
    return f"{name} ({', '.join(words)})"
