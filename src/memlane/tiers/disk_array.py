"""Several disk tiers as one: which key is on which disk, and how the reports of the parts of a call
become one. Everything else is each disk's own."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields
from hashlib import shake_256
from itertools import count
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from memlane._base.arguments import items_of
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.diagnosis import warn
from memlane._base.labels import LONGEST, checked_label
from memlane._base.paths import path_from
from memlane._locks import Lock
from memlane._native import DiskOrder, crc32c
from memlane.errors import (
    Closed,
    InvalidArgument,
    InvalidType,
    MemlaneError,
    SystemFault,
    TimedOut,
    WrongProcess,
    system_fault,
)
from memlane.tiers.disk import DiskStatistics, DiskTier, Latency
from memlane.tiers.reports import Reports
from memlane.tiers.tier import Done, Rows, Ticket, Tier, TierPin, distinct

_PLACES = 1 << 16  # that keys fall into; each is one disk's


T = TypeVar("T")


@dataclass(eq=False)
class _Job:
    """A call, which is done once all of its parts are."""

    ticket: Ticket
    ok: npt.NDArray[np.bool_]
    parts: int
    done: dict[DiskTier, Done] = field(default_factory=dict)
    is_reported: bool = False

    def report(self) -> Done:
        each = self.done.values()
        error = next((done.error for done in each if done.error is not None), None)
        nbytes, seconds = sum(done.bytes for done in each), max(done.seconds for done in each)
        return Done(self.ticket, self.ok, error, nbytes, seconds)


class DiskArray(Tier):
    """Blocks on several disks, each with a `DiskTier` of its own::

        with DiskArray(["/nvme0/kv", "/nvme1/kv"], rows, "200GiB") as tier:
            ...

    A key belongs to one disk, by its hash and the path of the folder; a disk with twice as many
    slots has twice as many keys. A disk that fails or does not answer takes only its share away:
    its keys are misses. A folder that is added or left out at a restart moves only its share of the
    keys, and the order of the folders does not matter. One that is left out keeps its blocks for
    the day that it is back, also those that were forgotten or cleared meanwhile: delete its files.

    Attributes:
        disks: the tiers by their folders, for their statistics. Their calls are the array's.
    """

    is_private = True
    fails_in_part = True

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        rows: Any,
        capacity: int | str,
        **options: Any,
    ) -> None:
        """Args:
            paths: folders, one on each disk. One that the system refuses, or that has no space, is
                left out with a warning, unless all are.
            rows: as of every `Tier`.
            capacity: of each folder, as of `DiskTier`; a disk that has less takes what it has.
            options: what else a `DiskTier` takes, for each folder. A policy must be a name. With
                `name="kv"` the folders' tiers are called `kv[0]`, `kv[1]`, in their order.

        Raises:
            InvalidType, InvalidArgument: an argument is not valid, there is no path, or one comes
                twice.
            MemlaneError: as `DiskTier`.
        """
        if isinstance(paths, str | bytes | os.PathLike):
            raise InvalidType("paths must be a list of folders, not one")
        folders = [os.path.abspath(path_from("paths", each)) for each in items_of("paths", paths)]
        if not folders or len({*folders}) != len(folders):
            raise InvalidArgument("paths must be one or more folders, all different")
        if not isinstance(options.get("policy", ""), str):
            raise InvalidType("policy of a DiskArray must be a name: each disk has one of its own")
        label = checked_label(options.pop("name", None), LONGEST - len(f"[{len(folders)}]"))
        self._timeout = seconds_of(options.get("timeout", 5.0))
        self._rows = Rows(rows)
        self.disks: dict[str, DiskTier] = {}
        self._refusals: dict[str, SystemFault] = {}  # of the folders that are left out
        with ExitStack() as opened:
            try:
                self._ready = opened.enter_context(select.epoll())
            except OSError as error:
                raise system_fault(error.errno or 0, "cannot make an epoll descriptor") from None
            for number, folder in enumerate(folders):
                called = f"{label}[{number}]" if label else None
                try:
                    disk = opened.enter_context(
                        DiskTier(folder, rows, capacity, name=called, **options)
                    )
                    self.disks[folder] = disk
                    self._ready.register(disk.fileno(), select.EPOLLIN)
                except SystemFault as error:
                    self._refusals[folder] = error
            if not self.disks:
                raise self._refusals[folders[0]]
            for refusal in self._refusals.values():
                warn("a disk of the tier is left out until it is opened again: %s", refusal)
            opened.pop_all()
        self._each = [*self.disks.values()]
        self._disk_of = [self._each[number] for number in _numbers_of_places(self.disks)]
        self._namespace = own = self._each[0]._namespace
        for disk in self._each:
            disk._namespace = own  # so that all change their epoch at once
        self._tickets = count(1)
        self._parts: dict[tuple[DiskTier, Ticket], tuple[_Job, list[int]]] = {}
        self._lock = (
            Lock()
        )  # while the parts of a call are begun or collected, or the epoch changes
        self._reports = Reports(self._each[0]._native)

    def split(self, keys: Sequence[bytes]) -> list[tuple[DiskTier, list[bytes], list[int]]]:
        """Returns the keys of each disk that has some, and their places; of one disk at least.
        Raises `InvalidType`, `InvalidArgument`."""
        asked = distinct(keys)
        places: dict[DiskTier, list[int]] = {}
        for at, key in enumerate(asked):
            places.setdefault(self._disk_of[crc32c(key) % _PLACES], []).append(at)
        parts = [(disk, [asked[at] for at in own], own) for disk, own in places.items()]
        return parts or [(self._each[0], [], [])]

    def _locked(self) -> Lock:
        """Returns the lock. Raises `Closed`, and `WrongProcess` in a forked child, where a thread
        that is not there may have it for ever."""
        self._each[0].fileno()
        return self._lock

    # Keys ----------------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        with self._locked():
            return _joined([(disk.has(own), at) for disk, own, at in self.split(keys)])

    def peek(self, keys: Sequence[bytes]) -> list[bool | None]:
        with self._locked():
            return _joined([(disk.peek(own), at) for disk, own, at in self.split(keys)])

    def hold(self, keys: Sequence[bytes]) -> TierPin:
        with self._locked():
            pins = [(disk.hold(own), at) for disk, own, at in self.split(keys)]

        def release() -> None:
            for pin, _ in pins:
                pin.release()

        return TierPin(_joined([(pin.there, at) for pin, at in pins]), release)

    def touch(self, keys: Sequence[bytes]) -> None:
        for disk, own, _ in self.split(keys):
            disk.touch(own)

    def forget(self, keys: Sequence[bytes]) -> None:
        asked = distinct(keys)
        with self._locked():
            # Of all: a key may be on another disk, from when there were more, or fewer.
            orders = [disk._begin_to_forget(asked) for disk in self._each]
        self._wait_until_erased(orders)

    def clear(self) -> None:
        self._wait_until_erased([disk._begin_to_clear() for disk in self._each])

    def _wait_until_erased(self, orders: list[DiskOrder]) -> None:
        deadline = Deadline(self._timeout)
        parts = zip(self._each, orders, strict=True)
        _do_all(parts, lambda part: part[0]._wait_until_erased(part[1], deadline))
        for folder, refusal in self._refusals.items():
            what = f"{folder} is left out, and keeps its blocks: a restart may find them"
            raise system_fault(refusal.errno or errno.EIO, what)

    def set_epoch(self, epoch: str | bytes | int) -> None:
        with self._locked():
            super().set_epoch(epoch)

    # Blocks --------------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        return self._begin(DiskTier.store, keys, ids, timeout)

    def store_evicted(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        return self._begin(DiskTier.store_evicted, keys, ids, timeout)

    def load(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        return self._begin(DiskTier.load, keys, ids, timeout)

    def _begin(
        self,
        begin: Callable[[DiskTier, list[bytes], npt.ArrayLike, float], Ticket],
        keys: Sequence[bytes],
        ids: npt.ArrayLike,
        timeout: float | None,
    ) -> Ticket:
        parts = self.split(keys)
        count = sum(len(own) for _, own, _ in parts)
        rows = self._rows.ids(count, ids)
        deadline = Deadline(self._timeout if timeout is None else timeout)
        job = _Job(Ticket(next(self._tickets)), np.zeros(count, np.bool_), len(parts))
        with self._locked():  # no part is reported before all are begun
            before = {disk: disk._native.last for disk, _, _ in parts}
            try:
                for disk, own, at in parts:
                    ticket = begin(disk, own, rows[at], deadline.left())
                    self._parts[disk, ticket] = (job, at)
            except BaseException:  # the parts that were begun, known by now or not, are reported
                for disk, _, at in parts:
                    for number in range(before[disk] + 1, disk._native.last + 1):
                        self._parts.setdefault((disk, Ticket(number)), (job, at))
                job.parts = sum(part is job for part, _ in self._parts.values())
                raise
        return job.ticket

    def poll(self) -> list[Done]:
        return self._reports.take(self._collect)

    def _collect(self) -> None:
        if self._lock._is_owned():  # type: ignore[attr-defined]  # by a call that this interrupts
            return
        with self._locked():
            for disk in self._each:
                disk._collect()
                for done in disk._reports.each():
                    self._add(disk, done)

    def _add(self, disk: DiskTier, done: Done) -> None:
        """Adds the report of a part; a second time, after an interruption, to no effect."""
        job, at = self._parts.get((disk, done.ticket), (None, []))
        if job is None:  # it was added
            return
        job.ok[at], job.done[disk] = done.ok, done
        if len(job.done) == job.parts and not job.is_reported:
            report, reports = [job.report()], self._reports
            reports.waiting += report  # no call from here on, so no interruption
            job.is_reported = True
        self._parts.pop((disk, done.ticket), None)

    def fileno(self) -> int:
        self._each[0].fileno()
        return self._ready.fileno()

    # Facts and life ------------------------------------------------------------------------------

    @property
    def is_direct(self) -> bool:
        """True if all disks are read and written past the page cache."""
        return all(disk.is_direct for disk in self._each)

    def statistics(self) -> DiskStatistics:
        """Returns the sums of the disks' counters; latencies are those of the slowest, and what is
        true of one disk is true. Raises `Closed`, `WrongProcess`."""
        each = [disk.statistics() for disk in self._each]
        names = [field.name for field in fields(DiskStatistics)]
        sums = {name: _sum([getattr(one, name) for one in each]) for name in names}
        return DiskStatistics(**sums)

    def drain(self, timeout: float | None = None) -> bool:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        idle = [disk.drain(deadline.left()) for disk in self._each]
        return all(idle)

    def close(self, timeout: float | None = None) -> None:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        for disk in self._each:  # before one that does not answer takes all the time
            if deadline.left():
                with suppress(Closed, WrongProcess):
                    disk._native.keep_uses()
        with suppress(WrongProcess):
            while all(_is_idle(disk, deadline.left()) for disk in self._each):
                with self._lock:  # so that no other thread begins anything now
                    if all(_is_idle(disk, 0) for disk in self._each):
                        _do_all(self._each, lambda disk: disk.close(deadline.left()))
                        self._ready.close()
                        return
            # All stay open: reports would be lost with a disk that is closed before another one.
            raise TimedOut("a disk tier has work under way; its rows must not be freed", timeout)


def _is_idle(disk: DiskTier, timeout: float) -> bool:
    """Waits until it is, or was closed by a call that was interrupted."""
    try:
        return disk.drain(timeout)
    except Closed:
        return True


def _numbers_of_places(disks: dict[str, DiskTier]) -> list[int]:
    """Returns the number of the disk that each place belongs to: the one with the highest draw. A
    draw depends on the disk's path alone, so another disk takes places and moves none among the
    others; its power is such that the disk has places in proportion to its slots."""
    scores = []
    for path, disk in disks.items():
        draws = np.frombuffer(shake_256(os.fsencode(path)).digest(8 * _PLACES), "<u8")
        scores.append(np.log((draws + 1.0) / 2.0**64) / disk.statistics().slots)
    numbers: list[int] = np.argmax(scores, axis=0).tolist()
    return numbers


def _joined(parts: list[tuple[list[T], list[int]]]) -> list[T]:
    """Returns the values of the parts, in the order of their places."""
    placed = {at: value for values, own in parts for at, value in zip(own, values, strict=True)}
    return [placed[at] for at in sorted(placed)]


def _do_all(parts: Iterable[T], call: Callable[[T], None]) -> None:
    """Calls it for each, whatever the others raise. Raises the first error."""
    errors: list[MemlaneError] = []
    for part in parts:
        try:
            call(part)
        except MemlaneError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _sum(values: list[Any]) -> Any:
    if isinstance(values[0], Latency):
        return Latency(max(each.p50 for each in values), max(each.p99 for each in values))
    if isinstance(values[0], bool):
        return any(values)
    return max(values) if isinstance(values[0], str) else sum(values)  # "threads", if one has them
