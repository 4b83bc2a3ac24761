"""Starts a holder of a region: enter, wait for the space or reserve it, populate.

A native call takes at most a tenth of a second; in between, Python handles signals, deadlines
and the caller's `progress`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from memlane._base import processes
from memlane._base.deadline import NEVER, Deadline
from memlane._base.naming import shown
from memlane._base.segments import check_space
from memlane._native import Population, RegionFile
from memlane.errors import SegmentRefused, TimedOut, Unsupported
from memlane.offload import _pages

Progress = Callable[[int, int], object]
_SLICE = 0.1
# Grace period in seconds: processes that start at the same moment also have the file open without
# holding it, but not for this long.
_FOREIGN = 1.0
_log = logging.getLogger("memlane.offload")


@dataclass(frozen=True)
class Part:
    """Part of a region: `count` times `size` bytes, `stride` bytes apart."""

    offset: int
    size: int
    stride: int
    count: int


NOTHING = Part(0, 0, 0, 0)


@dataclass(frozen=True)
class Plan:
    """A holder's request.

    Attributes:
        part: what it populates if it reserves the space.
        joiners_part: what it populates if the space is reserved already; differs only in engines.
        check: called before this process reserves the space, and may raise; set by engines only.
        label: what people call the region, unless those that hold it have a name for it, or empty.
    """

    directory: str
    path: str
    total_bytes: int
    part: Part
    joiners_part: Part
    threads: int
    pages: _pages.Pages
    participants: int | None = None
    progress: Progress | None = None
    timeout: float | None = 30.0
    check: Callable[[int], object] | None = None
    label: str = ""

    @property
    def shown(self) -> str:
        """The path, for texts, and the name that was given."""
        path = shown(self.path)
        return f"{self.label} ({path})" if self.label else path


@dataclass(frozen=True)
class Started:
    """The result of a start."""

    is_creator: bool
    pages: _pages.Rung


def start(file: RegionFile, plan: Plan) -> Started:
    """Maps and populates `file`. If this raises, the caller must call `leave`."""
    is_creator = _enter(file, plan) == "created"
    is_builder = _await_space(file, plan) == "build"
    if is_builder:
        if plan.check is not None:
            plan.check(plan.total_bytes)
        # Without what a builder that died has already reserved.
        check_space(shown(plan.directory), plan.total_bytes - file.allocated, file.free)
    file.map(plan.pages != "4k")
    if not is_builder:
        _mark_mapped(file, plan)
    began = time.monotonic()
    part = plan.part if is_builder else plan.joiners_part
    population = Population(
        file,
        *(part.offset, part.size, part.stride, part.count),
        is_builder,
        plan.pages,
        plan.threads,
    )
    try:
        _populate(file, population, plan, is_builder)
    finally:
        population.stop()
    _log.debug(
        "%s: %d bytes populated in %.3f s by %d threads%s",
        plan.shown,
        population.bytes,
        time.monotonic() - began,
        plan.threads,
        ", page by page (no MADV_POPULATE_WRITE)" if population.was_touched else "",
    )
    return Started(is_creator, _pages.rung_of(file.huge_pages, plan.total_bytes))


def _enter(file: RegionFile, plan: Plan) -> str:
    deadline = Deadline(plan.timeout)
    foreign_since: float | None = None
    while (entry := file.enter(_SLICE)) in ("waiting", "foreign"):
        now = time.monotonic()
        if entry == "waiting":
            foreign_since = None
        elif foreign_since is None:
            foreign_since = now
        elif now - foreign_since >= _FOREIGN:
            raise _in_use(plan)
        if deadline.has_passed():
            raise TimedOut(
                f"could not join {plan.shown} within {plan.timeout} s: a process has been stopped "
                f"while joining or leaving it",
                plan.timeout,
            )
    return entry


def _in_use(plan: Plan) -> SegmentRefused:
    who = processes.holders_of(plan.path) or "a process that is not visible from here"
    return SegmentRefused(
        f"{plan.shown} is in use by {who}, but not as a region of memlane: it belongs to another "
        f"implementation. End that process, or choose another instance_id"
    )


def _await_space(file: RegionFile, plan: Plan) -> str:
    """Waits for the space while it grows; gives up after `timeout` seconds without growth."""
    seen, deadline = -1, NEVER
    while (turn := file.await_space(_SLICE)) == "waiting":
        if (allocated := file.allocated) != seen:
            seen, deadline = allocated, Deadline(plan.timeout)
        elif deadline.has_passed():
            raise TimedOut(
                f"the space of {plan.shown} is not complete: {allocated} of {plan.total_bytes} "
                f"bytes, unchanged for {plan.timeout} s; pid {file.builder} is reserving it",
                plan.timeout,
            )
    return turn


def _mark_mapped(file: RegionFile, plan: Plan) -> None:
    if _remove_name_at(plan.participants or 0, file, plan):
        _log.info(
            "removed the name %s (%d bytes): all %d participants have mapped it",
            plan.shown,
            plan.total_bytes,
            plan.participants,
        )


def remove_name(file: RegionFile, plan: Plan) -> None:
    """Call it once all have mapped the file; does nothing if another region has the name by now."""
    if _remove_name_at(1, file, plan):
        _log.info("removed the name %s (%d bytes)", plan.shown, plan.total_bytes)


def _remove_name_at(participants: int, file: RegionFile, plan: Plan) -> bool:
    deadline = Deadline(plan.timeout)
    while (naming := file.mark_mapped(participants, _SLICE)) == "waiting":
        if deadline.has_passed():
            raise TimedOut(
                f"could not remove the name {plan.shown} within {plan.timeout} s: a process has "
                f"been stopped while joining or leaving",
                plan.timeout,
            )
    return naming == "removed"


def _populate(file: RegionFile, population: Population, plan: Plan, is_builder: bool) -> None:
    """Publishes the region to the others as soon as all the space is reserved."""
    total = population.bytes
    told = -1
    state = "working"
    while state != "done":
        state = population.wait(_SLICE)
        if is_builder and state != "working":
            if plan.pages == "huge" and not population.huge_pages:
                raise Unsupported(
                    f"the kernel makes no huge pages for {plan.shown}: it needs Linux 6.1 and free "
                    f"memory in whole huge pages, and 'deny' in "
                    f"/sys/kernel/mm/transparent_hugepage/shmem_enabled forbids them; or pass "
                    f"pages='auto'"
                )
            file.publish(population.huge_pages)
            _mark_mapped(file, plan)
            is_builder = False
        if plan.progress is not None and (done := population.done) != told:
            told = done
            plan.progress(done, total)
