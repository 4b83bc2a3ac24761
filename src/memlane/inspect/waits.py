"""Who waits for whom: decided from one look at the segments, at a given moment."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from memlane._base import blame
from memlane._base.blame import Facts, advice, role_name, suspicion
from memlane._base.slots import facts_of
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
        facts: what is said of each of the awaited.
    """

    segment: str
    waiter: Participant
    seconds: float
    reason: Reason
    awaited: tuple[Participant, ...]
    absent_elsewhere: int
    advice: str
    facts: tuple[Facts, ...] = ()

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
        pairs = [(other, facts_about(other, now)) for other in awaited]
        pairs.sort(key=lambda pair: suspicion(pair[1]))
        ordered, facts = tuple(other for other, _ in pairs), tuple(each for _, each in pairs)
        elsewhere = segment.absent_elsewhere if reason == "not all attached" else 0
        waits.append(
            Wait(segment.name, who, seconds, reason, ordered, elsewhere, advice(facts), facts)
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


def facts_about(who: Participant, now: float) -> Facts:
    """What blame is decided and worded by, at that moment of `time.monotonic()`."""
    return facts_of(
        role_name(who.role, who.rank),
        who.state,
        who.pid,
        who.start_ticks or 0,
        activity=who.activity,
        behind=who.behind,
        views=who.views,
        views_for=0.0 if who.views_since is None else max(0.0, now - who.views_since),
        silent_for=None if who.last_progress is None else max(0.0, now - who.last_progress),
    )


def headline(wait: Wait, segment: str, title: str) -> str:
    """Who waits in that segment, for how long and what for; `title` is of the waiter's process."""
    who = wait.waiter
    name = who.role if who.rank is None else role_name(who.role, who.rank)
    where = f" of {segment}" if segment else ""
    return blame.headline(name, who.pid, title, wait.seconds, wait.reason, where)
