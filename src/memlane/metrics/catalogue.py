"""Every metric that memlane has, and what a look at the segments says of each. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from memlane import __version__
from memlane._base.blame import identity
from memlane._base.naming import names_of
from memlane._base.tier_counters import TIER_COUNTERS, TIER_TIMES
from memlane.inspect.looks import Look
from memlane.inspect.segment import Deliveries, Participant, Segment
from memlane.metrics.tally import Tally

Kind = Literal["counter", "gauge", "histogram"]
Sample = tuple[tuple[str, ...], float | Deliveries]
Family = tuple["Metric", list[Sample]]

BOUNDS = tuple((exponent, 2**exponent / 1e6) for exponent in range(2, 25, 2))
"""The buckets of a histogram: the index into `Deliveries.counts` of the last that counts, and the
bound in seconds: 4 us, 16 us, ... 16.8 s."""


@dataclass(frozen=True)
class Metric:
    """One metric: its name, what it counts, and the names of its labels."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]


def cumulative(deliveries: Deliveries) -> list[int]:
    """The value of each bucket of BOUNDS, then of the one without a bound."""
    sums = list(accumulate(deliveries.counts))
    return [sums[index] for index, _ in BOUNDS] + [sums[-1]]


_ENDS = ("queue", "role", "rank", "pid")
_USERS = ("store", "role", "rank", "pid")


def _queue(name: str, kind: Kind, text: str, labels: tuple[str, ...] = _ENDS) -> Metric:
    return Metric(f"memlane_queue_{name}", kind, text, labels)


MESSAGES = _queue("messages_total", "counter", "Messages published or taken.")
BYTES = _queue("bytes_total", "counter", "Bytes of those messages, as encoded.")
WAITS = _queue("waits_total", "counter", "Calls that had to wait.")
EXTENTS = _queue("extents_total", "counter", "Messages that did not fit a chunk.")
LAG = _queue(
    "lag_messages",
    "gauge",
    "Published messages that a reader has yet to take; of the latest at most 1.",
)
SKIPPED = _queue("skipped_total", "counter", "Messages that a reader of the latest did not get.")
LENT = _queue("lent_bytes", "gauge", "Bytes that cannot be reused because of a reader's views.")
WAITING = _queue("waiting_seconds", "gauge", "How long the wait of this moment has lasted, or 0.")
DELIVERY = _queue(
    "delivery_seconds",
    "histogram",
    "Time from publishing to taking, of the first message after each tick of the clock.",
    ("queue", "rank", "pid"),
)
CHUNKS = _queue("chunks", "gauge", "Messages that a writer may be ahead.", ("queue",))
PARTICIPANTS = _queue(
    "participants", "gauge", "Writers and readers by state.", ("queue", "role", "state")
)
ELSEWHERE = _queue(
    "absent_elsewhere", "gauge", "Readers on other hosts that have not attached.", ("queue",)
)
STUCK = Metric(
    "memlane_stuck_seconds",
    "gauge",
    "How long somebody has waited for somebody else that does not wait itself; and for whom.",
    (*_ENDS, "reason", "awaited"),
)
STARTING = Metric(
    "memlane_starting_seconds",
    "gauge",
    "How long somebody has waited in wait_until_ready, as while a model is loaded; and for whom.",
    (*_ENDS, "awaited"),
)
SIZE = Metric("memlane_segment_bytes", "gauge", "Size of a segment.", ("segment", "kind"))
USED = Metric(
    "memlane_segment_used_bytes",
    "gauge",
    "Bytes of /dev/shm that a segment takes.",
    ("segment", "kind"),
)
LEFTOVERS = Metric("memlane_leftover_segments", "gauge", "Segments that dead processes left.", ())
LEFTOVER_BYTES = Metric("memlane_leftover_bytes", "gauge", "Bytes that those take.", ())
UNREADABLE = Metric("memlane_unreadable_segments", "gauge", "Segments that cannot be read.", ())
SHM_SIZE = Metric("memlane_shm_bytes", "gauge", "Size of /dev/shm.", ())
SHM_FREE = Metric("memlane_shm_free_bytes", "gauge", "Free bytes of /dev/shm.", ())
BUILD = Metric("memlane_build_info", "gauge", "1; the version of what has looked.", ("version",))
DEATHS = _queue(
    "deaths_total",
    "counter",
    "Deaths that this observer has seen, of writers and readers that had not closed; of queues "
    "without a name together.",
    ("queue", "role"),
)
LOOK_ERRORS = Metric("memlane_look_errors_total", "counter", "Looks that failed.", ())
LOOK_SECONDS = Metric("memlane_look_seconds", "gauge", "Seconds that the look took.", ())
PINNED = Metric(
    "memlane_store_pinned_objects",
    "gauge",
    "Objects that a reader reads, or keeps.",
    _USERS,
)
OWED = Metric(
    "memlane_store_owed_objects",
    "gauge",
    "Objects that a reader has not read as often as they were put.",
    _USERS,
)
REGION_SIZE = Metric("memlane_region_bytes", "gauge", "Size of an offload region.", ("region",))
REGION_HOLDERS = Metric("memlane_region_holders", "gauge", "Processes that hold it.", ("region",))

_COUNTED: dict[str, dict[str, tuple[str, str]]] = {
    "store": {
        "objects": ("gauge", "Objects in a store."),
        "object_bytes": ("gauge", "Bytes of those objects."),
        "puts": ("counter", "Objects that were put."),
        "hits": ("counter", "Puts that found their object stored already."),
        "evictions": ("counter", "Objects that were evicted."),
    },
    "tier": {each.name: (each.kind, each.help) for each in TIER_COUNTERS},
}
_COUNTERS = {
    (system, counter): Metric(
        f"memlane_{system}_{counter}{'_total' if kind == 'counter' else ''}",
        kind,  # type: ignore[arg-type]
        text,
        (system,),
    )
    for system, counters in _COUNTED.items()
    for counter, (kind, text) in counters.items()
}
_TIMES = {
    name: Metric(f"memlane_tier_{name}", "histogram", text, ("tier",))
    for name, text in TIER_TIMES.items()
}
METRICS = (
    *(MESSAGES, BYTES, WAITS, EXTENTS, LAG, SKIPPED, LENT, WAITING, DELIVERY, CHUNKS, PARTICIPANTS),
    *(ELSEWHERE, STUCK, STARTING, SIZE, USED, LEFTOVERS, LEFTOVER_BYTES, UNREADABLE),
    *(DEATHS, LOOK_ERRORS, LOOK_SECONDS),
    *(SHM_SIZE, SHM_FREE, BUILD, PINNED, OWED, REGION_SIZE, REGION_HOLDERS, *_COUNTERS.values()),
    *_TIMES.values(),
)


class _Samples:
    """One value for the same labels: a segment may have the name of an older one that is held, and
    what slots say may be false."""

    def __init__(self) -> None:
        self.of: dict[Metric, dict[tuple[str, ...], float | Deliveries]] = {
            metric: {} for metric in METRICS
        }

    def add(self, metric: Metric, labels: tuple[str, ...], value: float | Deliveries) -> None:
        self.of[metric].setdefault(labels, value)


def measure(look: Look, shm: Mapping[str, int], tally: Tally) -> Iterator[Family]:
    """All metrics, those without samples too.

    Args:
        shm: bytes of /dev/shm: `total` and `free`.
        tally: what this observer has counted up to this look.
    """
    samples = _Samples()
    titles = _titles(look.segments)
    for segment in look.segments:
        title = titles[segment.name]
        samples.add(SIZE, (title, segment.kind), segment.size)
        samples.add(USED, (title, segment.kind), segment.used)
        for counter, value in segment.counters.items():
            if (metric := _COUNTERS.get((segment.kind, counter))) is not None:
                samples.add(metric, (title,), value)
        for name, times in segment.times.items():
            samples.add(_TIMES[name], (title,), times)
        if segment.kind == "queue":
            _add_queue(samples, title, segment, look.at)
        elif segment.kind == "store":
            _add_store(samples, title, segment)
        elif segment.kind == "region":
            samples.add(REGION_SIZE, (title,), segment.size)
            samples.add(REGION_HOLDERS, (title,), len(segment.participants))
    for wait in look.waits:
        awaited = names_of([identity(who) for who in wait.facts])
        end = _end(titles.get(wait.segment, wait.segment), wait.waiter)
        if wait.is_start:
            samples.add(STARTING, (*end, awaited), wait.seconds)
        elif not wait.is_in_turn:
            samples.add(STUCK, (*end, wait.reason, awaited), wait.seconds)
    left = [segment for segment in look.segments if segment.is_leftover]
    samples.add(LEFTOVERS, (), len(left))
    samples.add(LEFTOVER_BYTES, (), sum(segment.used for segment in left))
    unreadable = sum(segment.problem is not None for segment in look.segments)
    samples.add(UNREADABLE, (), unreadable)
    samples.add(SHM_SIZE, (), shm["total"])
    samples.add(SHM_FREE, (), shm["free"])
    samples.add(BUILD, (__version__,), 1)
    for of, count in tally.deaths.items():
        samples.add(DEATHS, of, count)
    samples.add(LOOK_ERRORS, (), tally.errors)
    samples.add(LOOK_SECONDS, (), tally.seconds)
    for metric, values in samples.of.items():
        yield metric, list(values.items())


def _titles(segments: Sequence[Segment]) -> dict[str, str]:
    """By the name of each segment the value of its label: what people call it, which stays when the
    engine starts again; with digits of its id, or the rank of a reader of a writer elsewhere, while
    several have that name; else its own name, as that of those which would still be alike."""
    times = Counter(segment.label for segment in segments)
    written_here = Counter(each.label for each in segments if not _comes_from_afar(each))
    titles = {}
    for each in segments:
        title = each.label
        if _comes_from_afar(each) and times[title] > 1:
            title += f"-reader-{each.participants[-1].rank}"
        elif written_here[title] > 1:
            title += f"-{each.id[:10]}"
        if each.label:
            titles[each.name] = title
    taken = Counter([*titles.values(), *(segment.name for segment in segments)])
    return {
        each.name: title if taken[title := titles.get(each.name, "")] == 1 else each.name
        for each in segments
    }


def _comes_from_afar(segment: Segment) -> bool:
    """Returns whether its writer is on another host."""
    return bool(segment.participants) and segment.participants[0].is_remote


def _end(name: str, who: Participant) -> tuple[str, str, str, str]:
    rank = "" if who.rank is None else str(who.rank)
    return name, who.role, rank, "" if who.pid is None else str(who.pid)


def _add_queue(samples: _Samples, name: str, segment: Segment, now: float) -> None:
    people = segment.participants
    samples.add(CHUNKS, (name,), segment.geometry["max_chunks"])
    samples.add(ELSEWHERE, (name,), segment.absent_elsewhere)
    states: dict[tuple[str, str], int] = {}
    for who in people:
        states[who.role, who.state] = states.get((who.role, who.state), 0) + 1
        if who.pid is None:
            continue
        end = _end(name, who)
        samples.add(MESSAGES, end, who.position)
        samples.add(BYTES, end, who.bytes)
        samples.add(WAITS, end, who.waits)
        is_waiting = who.activity in ("waiting", "attaching") and who.activity_since is not None
        since = who.activity_since if is_waiting else None
        samples.add(WAITING, end, 0.0 if since is None else max(0.0, now - since))
        if who.role == "writer":
            samples.add(EXTENTS, end, who.extents)
            continue
        samples.add(LAG, end, who.behind)
        if segment.mode == "latest":
            samples.add(SKIPPED, end, who.skipped)
        samples.add(LENT, end, who.lent)
        if who.deliveries is not None:
            samples.add(DELIVERY, (name, end[2], end[3]), who.deliveries)
    for (role, state), count in sorted(states.items()):
        samples.add(PARTICIPANTS, (name, role, state), count)


def _add_store(samples: _Samples, name: str, segment: Segment) -> None:
    for who in segment.participants:
        if who.pid is not None and who.role == "reader":
            user = _end(name, who)
            samples.add(PINNED, user, who.pinned)
            samples.add(OWED, user, who.owed)
