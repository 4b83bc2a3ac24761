"""`memlane trace`: what every participant did, sampled from outside, as a timeline for Perfetto."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memlane._base import processes
from memlane._base.slots import ATTACHED, VIEWS
from memlane.cli.writing import json_text, replacing, title
from memlane.inspect import layout, locks
from memlane.inspect.layout import Header
from memlane.inspect.segment import Known, files, look, opened

PERIOD = 1e-3  # seconds between two samples
_COUNTED = 0.02  # seconds between two values of a counter
_ACTIVITIES = (
    None,  # not in memlane
    "waiting",
    "waiting for all to attach",
    "holding",  # a block
    "copying",
    "decoding",
)


def doing(state: int, activity: int, views: int) -> str | None:
    """Returns what a sample shows; None: nothing of memlane's."""
    if state != ATTACHED:
        return None
    what = _ACTIVITIES[activity] if activity < len(_ACTIVITIES) else None
    return what or ("holding" if views & VIEWS else None)


class Track:
    """One participant's row: joins equal samples to spans. Times in seconds."""

    def __init__(self, pid: int, number: int, name: str) -> None:
        self.pid, self.number, self.name = pid, number, name
        self.events: list[dict[str, Any]] = []
        self._what: str | None = None
        self._began = 0.0
        self._position = 0

    def sample(self, at: float, what: str | None, position: int) -> None:
        if what == self._what:
            return
        self.end(at, position)
        self._what, self._began, self._position = what, at, position

    def end(self, at: float, position: int) -> None:
        """The end of the open span."""
        if self._what is not None:
            self.events.append(
                {
                    "name": self._what,
                    "cat": "memlane",
                    "ph": "X",
                    "ts": 1e6 * self._began,
                    "dur": 1e6 * (at - self._began),
                    "pid": self.pid,
                    "tid": self.number,
                    "args": {"messages": max(0, position - self._position)},
                }
            )
        self._what = None


@dataclass
class Watched:
    """An open segment and its rows; `counters` are of the lag of each reader."""

    title: str
    file: int
    header: Header
    tracks: list[Track]
    counters: list[dict[str, Any]]
    dead: set[int] = field(default_factory=set)
    counted_at: float = 0.0
    is_gone: bool = False

    def sample(self, at: float) -> None:
        slots = layout.glance(self.file, self.header)
        self.is_gone = not slots
        if self.is_gone:  # cut
            for track in self.tracks:
                track.sample(at, None, 0)
        is_due = at - self.counted_at >= _COUNTED
        if is_due:  # a slot does not say that its process was killed; the lock does
            self.counted_at = at
            attached = [number for number, slot in enumerate(slots) if slot[0] == ATTACHED]
            self.dead = {n for n in attached if not locks.is_slot_held(self.file, n)}
        for number, (state, pid, skipped, position, activity, views) in enumerate(slots):
            track = self.tracks[number]
            track.pid = track.pid or pid  # it may have attached since
            what = None if number in self.dead else doing(state, activity, views)
            track.sample(at, what, position - skipped)
        if slots and is_due and self.header.kind == "queue":
            self.counters.append(self._lag(at, slots))

    def _lag(self, at: float, slots: list[tuple[int, int, int, int, int, int]]) -> dict[str, Any]:
        _, writer, _, published, *_ = slots[0]
        lag = {
            track.name.rpartition(": ")[2]: layout.behind(self.header, published, position)
            for track, (state, _, _, position, *_) in zip(self.tracks[1:], slots[1:], strict=True)
            if state == ATTACHED
        }
        name = f"lag of {self.title}"
        return {"name": name, "ph": "C", "ts": 1e6 * at, "pid": writer, "args": lag}

    def end(self, at: float) -> None:
        slots = layout.glance(self.file, self.header)
        for number, track in enumerate(self.tracks):
            track.end(at, slots[number][3] - slots[number][2] if slots else 0)


def watch(pid: int, stack: ExitStack) -> list[Watched]:
    """The queues and stores in which the process takes part; open until the stack ends."""
    watched: list[Watched] = []
    known = Known()
    numbers = iter(range(1, 1 << 30))
    for found in files(pid):
        file = stack.enter_context(opened(found))
        segment = None if file is None else look(file, found, known)
        if file is None or segment is None or segment.kind not in ("queue", "store"):
            continue
        header = known.header_of(file)
        if (
            header is None
            or header.kind == "peers"
            or pid not in [who.pid for who in segment.participants]
        ):
            continue
        tracks = []
        called = title(segment.name, segment.label)
        for who in segment.participants:
            end = who.role if who.rank is None else f"{who.role} {who.rank}"
            name = f"{segment.kind} {called}: {end}"
            tracks.append(Track(who.pid or 0, next(numbers), name))
        watched.append(Watched(called, file, header, tracks, []))
    return watched


def sample(watched: list[Watched], seconds: float) -> int:
    """Samples for so long, or until it is interrupted; returns how often."""
    with suppress(OSError):  # it must not take the core from whom it watches
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.nice(10)
    due = time.monotonic()
    end, count = due + seconds, 0
    with suppress(KeyboardInterrupt):
        while (now := time.monotonic()) < end:
            for each in watched:
                if not each.is_gone:
                    each.sample(now)
            count += 1
            due = max(due + PERIOD, now)  # what was missed is not made up for
            time.sleep(max(0.0, due - time.monotonic()))
    now = time.monotonic()
    for each in watched:
        each.end(now)
    return count


def events(watched: list[Watched]) -> Iterator[dict[str, Any]]:
    """Returns them in Chrome's trace event format; a process has a row for each of its ends."""
    pids: set[int] = set()
    for each in watched:
        for track in each.tracks:
            if not track.events:
                continue
            if track.pid not in pids:
                pids.add(track.pid)
                name = processes.name_of(track.pid) or "ended"
                yield _name("process_name", track.pid, 0, name)
            yield _name("thread_name", track.pid, track.number, track.name)
            yield from track.events
        yield from each.counters


def _name(kind: str, pid: int, number: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": number, "args": {"name": name}}


def run(pid: int, seconds: float, output: Path) -> str | None:
    """Samples, and writes the file; returns why there is nothing to see, or None.

    Raises:
        OSError: the file cannot be written.
        SystemFault: as `memlane.inspect.segments`.
    """
    with ExitStack() as stack:
        watched = watch(pid, stack)
        if not watched:
            return f"process {pid} takes part in no queue and no store"
        with replacing(output) as file:
            count = sample(watched, seconds)
            made = {"traceEvents": list(events(watched)), "displayTimeUnit": "ms"}
            file.write(json_text(made))
    print(f"{output}: {len(watched)} segments, {count} samples; open it in https://ui.perfetto.dev")
    return None
