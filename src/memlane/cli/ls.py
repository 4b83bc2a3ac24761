"""`memlane ls`: a row for each segment. Two looks, a moment apart, give the rates."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from memlane.cli import writing
from memlane.cli.rates import Rates
from memlane.inspect import Segment, segments
from memlane.inspect.segment import FOLDER, free_space

_APART = 0.1  # seconds

COLUMNS = [
    ("SEGMENT", "left"),
    ("KIND", "left"),
    ("SIZE", "right"),
    ("USED", "right"),
    ("HOLDERS", "left"),
    ("READERS", "right"),
    ("MSG/S", "right"),
    ("AGE", "right"),
    ("STATE", "left"),
]


def row(segment: Segment, per_second: float | None, now: float) -> list[str]:
    """The cells of COLUMNS."""
    return [
        writing.title(segment.name, segment.label),
        segment.kind,
        writing.size(segment),
        writing.used(segment),
        writing.holders(segment),
        writing.readers(segment),
        writing.rate(per_second),
        writing.duration(max(0.0, now - segment.created)),
        writing.state(segment),
    ]


def shm_line() -> str:
    sizes = {what: writing.nbytes(count) for what, count in free_space().items()}
    return f"{FOLDER}: {sizes['total']} total, {sizes['used']} used, {sizes['free']} free"


def as_json(segment: Segment, per_second: float | None) -> dict[str, Any]:
    """Bytes and seconds; times of participants become seconds ago."""
    now = time.monotonic()
    made = asdict(segment)
    made["messages_per_second"] = per_second
    made["age"] = max(0.0, time.time() - made.pop("created"))
    for who in made["participants"]:
        for name in ("last_progress", "activity_since", "views_since"):
            who[name] = None if who[name] is None else max(0.0, now - who[name])
        since = who.pop("activity_since")
        who["waiting_since"] = since if who["activity"] in ("waiting", "attaching") else None
    return made


def run(rates: Rates, as_json_text: bool) -> None:
    """`rates` has had its first look."""
    rates.rest(_APART)
    seen = segments()
    per_second = rates.of(seen, time.monotonic())
    if as_json_text:
        listed = [as_json(segment, per_second.get(segment.name)) for segment in seen]
        writing.print_json({"segments": listed, "shm": free_space()})
        return
    console = writing.console()
    if seen:
        now = time.time()
        rows = [row(segment, per_second.get(segment.name), now) for segment in seen]
        console.print(writing.table(COLUMNS, rows, console.width))
    else:
        console.print("no segments of this user")
    console.print(shm_line())
