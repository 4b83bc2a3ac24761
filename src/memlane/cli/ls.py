"""`memlane ls`: a row for each segment. Two looks, a moment apart, give the rates."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from memlane._doors.folder import Folder
from memlane.cli import writing
from memlane.cli.rates import Rates
from memlane.inspect import Segment, segments
from memlane.inspect.segment import FOLDER, free_space

_APART = 0.1  # seconds
_OF_A_GATHER = re.compile(r"(.+)\[[0-9]+\]")

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
_NAMES = [("NAME", "left"), ("SERVED BY", "left")]


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


def folded(seen: list[Segment], rates: Mapping[str, float]) -> list[tuple[Segment, float | None]]:
    """The segments and their rates; as one those of one reader whose labels differ in the number at
    the end, as the rings of a gather: `replies[0..7]`. Those with the same number are of two."""
    groups: dict[tuple[str, int | str], list[Segment]] = {}
    for each in seen:
        match = _OF_A_GATHER.fullmatch(each.label)
        reader = each.participants[-1].pid if match and each.participants else None
        whole = (match[1], reader) if match and reader and not each.is_leftover else ("", each.name)
        groups.setdefault(whole, []).append(each)
    rows: list[tuple[Segment, float | None]] = []
    for (called, _), rings in groups.items():
        is_one = len({each.label for each in rings}) == len(rings)
        for part in [rings] if is_one else [[each] for each in rings]:
            rows.append(_together(called, part, rates))
    return rows


def _together(
    called: str, rings: list[Segment], rates: Mapping[str, float]
) -> tuple[Segment, float | None]:
    if len(rings) == 1:
        return rings[0], rates.get(rings[0].name)
    numbers = [each.label[len(called) + 1 : -1] for each in rings]
    numbers.sort(key=lambda number: (len(number), number))
    known = [rates[each.name] for each in rings if each.name in rates]
    whole = replace(
        rings[0],
        label=f"{called}[{numbers[0]}..{numbers[-1]}]",
        size=sum(each.size for each in rings),
        used=sum(each.used for each in rings),
        pids=tuple(sorted({pid for each in rings for pid in each.pids})),
        created=min(each.created for each in rings),
        participants=tuple(who for each in rings for who in each.participants),
        is_leftover=any(each.is_leftover for each in rings),
    )
    return whole, sum(known) if known else None


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


def run(rates: Rates, as_json_text: bool, shows_space: bool = True) -> None:
    """`rates` has had its first look."""
    rates.rest(_APART)
    seen, served = segments(), _served()
    per_second = rates.of(seen, time.monotonic())
    if as_json_text:
        listed = [as_json(segment, per_second.get(segment.name)) for segment in seen]
        names = [{"name": name, "pid": pid} for name, pid in served.items()]
        writing.print_json({"segments": listed, "names": names, "shm": free_space()})
        return
    console = writing.console()
    if seen:
        now = time.time()
        rows = [row(segment, rate, now) for segment, rate in folded(seen, per_second)]
        console.print(writing.table(COLUMNS, rows, console.width))
    else:
        console.print("no segments of this user")
    if served:
        rows = [
            [name, "nobody, since its process has died" if pid is None else writing.process(pid)]
            for name, pid in served.items()
        ]
        console.print(writing.table(_NAMES, rows, console.width))
    if shows_space:
        console.print(shm_line())


def _served() -> dict[str, int | None]:
    """Returns the names of queues, and who serves them."""
    folder = Folder.existing()
    return {} if folder is None else folder.names()
