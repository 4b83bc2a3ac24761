"""Finds who is stuck now, from the segments and what /proc says of those that are awaited."""

from __future__ import annotations

import time
from collections.abc import Iterable

from memlane._base import blame, processes
from memlane._base.blame import Facts, role_name
from memlane._base.slots import facts_of
from memlane.errors import InvalidArgument
from memlane.inspect.decisions import Wait, process_of, waits_in
from memlane.inspect.segment import (
    Known,
    Participant,
    Segment,
    files,
    joined,
    look,
    opened,
)

__all__ = ["Wait", "facts_about", "headline", "looked", "seen_waits", "stuck", "title_of"]


def stuck(after: float = 1.0) -> list[Wait]:
    """Every writer or reader of this user's queues that waits for longer than `after` seconds for
    somebody else. A reader of an idle queue is not stuck; one of a stopped writer is, and one that
    waits for the answer to a request (`MessageQueue.answers`).

    One look: the segments say since when a wait lasts. Of a message that is being copied in they do
    not, so if a reader has waited for so long, a second look follows `after` seconds later.

    Raises:
        InvalidArgument: `after` is negative or not a number.
        SystemFault: as `segments`.
    """
    return looked(after)[1]


def looked(after: float) -> tuple[list[Segment], list[Wait]]:
    """The segments that `stuck` looks at, and the waits in them. Raises as it."""
    if isinstance(after, bool) or not isinstance(after, (int, float)) or not after >= 0:
        raise InvalidArgument(f"after must be a number of seconds, not {after!r}")
    known = Known()
    seen = _segments(known)
    if needs_second_look(seen, after, time.monotonic()):
        time.sleep(after)
        seen = _segments(known)
    return seen, seen_waits(seen, after)


def needs_second_look(segments: Iterable[Segment], after: float, now: float) -> bool:
    """Returns whether a reader has waited for long for a message that is being copied in."""
    return any(
        reader.activity == "waiting" and now - (reader.last_progress or now) >= after
        for segment in segments
        if segment.participants and segment.participants[0].activity == "copying"
        for reader in segment.participants[1:]
    )


def _segments(known: Known) -> list[Segment]:
    seen = []
    known.begin()
    for candidate in files():
        with opened(candidate) as file:
            if file is not None and (segment := look(file, candidate, known)) is not None:
                seen.append(segment)
    return joined(seen)


def seen_waits(segments: list[Segment], after: float) -> list[Wait]:
    """The waits in segments that have just been looked at."""
    return waits_in(segments, after, time.monotonic(), facts_about)


def facts_about(who: Participant, now: float) -> Facts:
    """Returns the facts by which blame is decided and worded, at that moment of
    `time.monotonic()`."""
    silent_for = None if who.last_progress is None else max(0.0, now - who.last_progress)
    if who.is_remote:
        doing, *more = who.doing or ("",)
        return Facts(
            role_name(who.role, who.rank),
            who.state,
            who.pid,
            address=who.address or "",
            doing=doing,
            behind=who.behind,
            silent_for=None if who.state == "absent" else silent_for,
            more=tuple(more),
        )
    return facts_of(
        role_name(who.role, who.rank),
        who.state,  # type: ignore[arg-type]  # only of others is it lost
        who.pid,
        who.start_ticks or 0,
        activity=who.activity,
        behind=who.behind,
        views=who.views,
        views_for=0.0 if who.views_since is None else max(0.0, now - who.views_since),
        silent_for=silent_for,
    )


def title_of(who: Participant) -> str:
    """The title of its process; empty if /proc does not show that one: its pid may be another's."""
    process = process_of(who)
    return "" if process is None else processes.name_of(process.pid)


def headline(wait: Wait, segment: str) -> str:
    """One line: who waits in the segment, for how long, and what for."""
    who = wait.waiter
    name = who.role if who.rank is None else role_name(who.role, who.rank)
    where = f" of {segment}" if segment else ""
    return blame.headline(name, who.pid, title_of(who), wait.seconds, wait.reason, where)
