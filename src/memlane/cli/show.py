"""`memlane show`: one segment, or those of one process, with a row for each participant. Two
looks, a moment apart, give the rates."""

from __future__ import annotations

import time
from typing import Any

from memlane.cli import writing
from memlane.cli.ls import as_json
from memlane.errors import InvalidArgument
from memlane.inspect import Participant, Segment, segments
from memlane.inspect.segment import Deliveries
from memlane.inspect.waits import title_of

_APART = 0.1  # seconds

COLUMNS = [
    ("WHO", "left"),
    ("PROCESS", "left"),
    ("STATE", "left"),
    ("FOR", "right"),
    ("MESSAGES", "right"),
    ("MSG/S", "right"),
    ("LAG", "right"),
    ("LAST", "right"),
    ("WAITS", "right"),
    ("KEEPS", "right"),
    ("P50", "right"),
    ("P99", "right"),
]

Key = tuple[str, str, int | None, int | None]


def asked_for(seen: list[Segment], what: str) -> list[Segment]:
    """Returns the segments that are called so: by label (a gather's has all its rings), by name, or
    by the first digits of a generated name; or else those that the process with that pid has.

    Raises:
        InvalidArgument: there is none.
    """
    found = [
        each
        for each in seen
        if what
        and (
            what in (each.name, each.label)
            or each.label.startswith(f"{what}[")
            or (what.startswith("memlane-") and each.name.startswith(what))
        )
    ] or [each for each in seen if what in _pids(each)]
    if not found:
        who = f"process {what} has none" if what.isdecimal() else f"none is called {what!r}"
        raise InvalidArgument(f"of this user's segments {who}; `memlane ls` lists them")
    return found


def _pids(segment: Segment) -> set[str]:
    here = (who.pid for who in segment.participants if not who.is_remote)
    return {str(pid) for pid in (*segment.pids, *segment.keepers, *here)}


def _positions(seen: list[Segment]) -> dict[Key, int]:
    return {_key(each, who): who.position for each in seen for who in each.participants}


def _key(segment: Segment, who: Participant) -> Key:
    return segment.name, who.role, who.rank, who.pid


def within(deliveries: Deliveries | None, part: float) -> float | None:
    """Seconds in which that part of the messages has arrived, to the next power of two; None: no
    message was measured, or it is beyond the last bound, which is minutes."""
    total = 0 if deliveries is None else sum(deliveries.counts)
    if deliveries is None or not total:
        return None
    seen = 0
    for exponent, count in enumerate(deliveries.counts[:-1]):
        seen += count
        if seen >= part * total:
            return (1 << exponent) / 1e6
    return None


def _latency(deliveries: Deliveries | None, part: float) -> str:
    seconds = within(deliveries, part)
    if seconds is None:
        return ""
    return f"{seconds * 1e6:.0f}us" if seconds < 1e-3 else f"{seconds * 1e3:.0f}ms"


def _ago(since: float | None, now: float) -> str:
    return "" if since is None else writing.duration(max(0.0, now - since))


def row(who: Participant, rate: float | None, now: float) -> list[str]:
    """The cells of COLUMNS."""
    is_here = who.pid is not None
    doing = who.activity if who.state == "running" and who.activity != "elsewhere" else who.state
    return [
        who.role if who.rank is None else f"{who.role} {who.rank}",
        f"{who.pid} {who.address or title_of(who)}".rstrip() if is_here else "",
        doing,
        _ago(who.activity_since, now),
        str(who.position) if is_here and who.role != "holder" else "",
        writing.rate(rate),
        str(who.behind) if who.role == "reader" and is_here else "",
        _ago(who.last_progress, now),
        str(who.waits) if is_here and who.role != "holder" else "",
        writing.nbytes(who.lent) if who.lent else "",
        _latency(who.deliveries, 0.5),
        _latency(who.deliveries, 0.99),
    ]


def _facts(segment: Segment) -> str:
    """The first line: what it is, and its numbers."""
    numbers = {**segment.geometry, **segment.counters}
    called = f"{segment.label} ({segment.name})" if segment.label else segment.name
    words = [f"{name.replace('_', ' ')} {value}" for name, value in numbers.items()]
    state = writing.state(segment)
    return ", ".join([f"{segment.kind} {called}", *([state] if state else []), *words])


def run(what: str, as_json_text: bool) -> None:
    """Raises InvalidArgument if there is no such segment, and as `segments`."""
    before, began = _positions(segments()), time.monotonic()
    time.sleep(_APART)
    found, now = asked_for(segments(), what), time.monotonic()
    rates = {
        key: max(0.0, (position - before[key]) / (now - began))
        for key, position in _positions(found).items()
        if key in before
    }
    if as_json_text:
        writing.print_json({"segments": [_json(each, rates) for each in found]})
        return
    console = writing.console()
    for segment in found:
        writing.print_lines(console, [_facts(segment)])
        if segment.problem is not None:
            writing.print_lines(console, [f"  {segment.problem}"])
        rows = [row(who, rates.get(_key(segment, who)), now) for who in segment.participants]
        used = [n for n in range(len(COLUMNS)) if any(cells[n] for cells in rows)]
        if rows:
            shown = [[cells[n] for n in used] for cells in rows]
            console.print(writing.table([COLUMNS[n] for n in used], shown, console.width))


def _json(segment: Segment, rates: dict[Key, float]) -> dict[str, Any]:
    made = as_json(segment, None)
    people = segment.participants
    for who, shown in zip(people, made["participants"], strict=True):
        shown["messages_per_second"] = rates.get(_key(segment, who))
    made["messages_per_second"] = rates.get(_key(segment, people[0])) if people else None
    return made
