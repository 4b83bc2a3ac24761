"""The tier on a local disk: its arguments, warnings and reports. Files, threads and eviction are
native code (native/tiers)."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import select
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from memlane import _native
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.diagnosis import warn
from memlane._base.labels import checked_label
from memlane._base.paths import path_from
from memlane.errors import (
    Closed,
    InvalidArgument,
    InvalidType,
    TimedOut,
    WrongProcess,
    system_fault,
)
from memlane.tiers.pool import Policy, PolicyName, checked_policy, show
from memlane.tiers.reports import Reports
from memlane.tiers.tier import (
    CHANGED,
    Done,
    Namespace,
    Rows,
    Ticket,
    Tier,
    TierPin,
    capacity_in_bytes,
    text,
)

_MOST_SLOTS = (1 << 31) - 1
_MOST_ROW_BYTES = 1 << 30  # one call of the system moves just less than 2 GiB
_PAGE = 4096
_THREADS = 8
_QUIET = 60.0  # seconds between two lines of one trouble
_MAY_RING = True  # whether io_uring is tried; tests do without

# Texts of the kinds of faults that native/tiers/block_jobs.hpp numbers; a miss has none.
_WHY = (
    *(None, None, CHANGED, None),
    *("the deadline has passed", "the disk does not answer"),
)


class _Logged(NamedTuple):
    """The time when a trouble was last logged, and how often it had been seen by then."""

    at: float
    times: int


Engine = Literal["io_uring", "threads"]


@dataclass(frozen=True)
class Latency:
    """Latencies of blocks in seconds, from the call on, accurate to 13 %; 0 before the first
    block."""

    p50: float
    p99: float


@dataclass(frozen=True)
class DiskStatistics:
    """Counters of a disk tier since it was opened, and its current state.

    Attributes:
        capacity: bytes of all slots.
        used: bytes of the slots that have a block.
        slots: how many blocks fit.
        blocks: slots in use: stored, being stored, or forgotten and still pinned.
        recovered: blocks that were there when it was opened.
        stored: blocks that were stored.
        loaded: blocks that were loaded.
        missed: loads of keys that were not there, or whose header is gone.
        declined: blocks that the policy did not admit, or for which every slot was pinned, or that
            were not tried because the disk refuses writes.
        evicted: blocks that made room for others.
        errors: reads and writes that the system refused.
        corrupt: loads whose bytes were not those that were stored.
        expired: blocks that missed their deadline.
        queue: blocks that wait for a thread.
        store_latency: from `store` to the end of each block.
        load_latency: from `load` to the end of each block.
        stalled: whether the disk has not answered since a deadline, of blocks or of an erasure.
        engine: as `DiskTier.engine`.
        retired: slots that are not used because the disk refused to write or read them. One is
            tried again after a second, then after two, four, up to a minute; if it takes a block,
            all are used again.
        detached: whether a file of the tier, or its folder, was deleted or moved. Blocks are still
            stored and loaded, but a restart finds none where they were.
        lookups: keys that `has` was asked for.
        found: of those, keys that were there.
        written: bytes that were written to the disk: past the page cache whole slots.
    """

    capacity: int
    used: int
    slots: int
    blocks: int
    recovered: int
    stored: int
    loaded: int
    missed: int
    declined: int
    evicted: int
    errors: int
    corrupt: int
    expired: int
    queue: int
    store_latency: Latency
    load_latency: Latency
    stalled: bool
    engine: Engine
    retired: int
    detached: bool
    lookups: int
    found: int
    written: int


class DiskTier(Tier):
    """Blocks in a pair of files, one slot each; never more than their capacity::

        with DiskTier("/nvme/kv", rows, "200GiB", namespace="llama-3-8b") as tier:
            ticket = tier.store(keys, ids)
            for done in tier.poll():
                ...

    Each block has a CRC-32C seeded with its key: bytes other than those that were stored are a
    miss. Nothing is ever flushed: a power cut costs blocks, not their correctness; the end of the
    process costs only the blocks under way. The files reveal prompts; only their user can read
    them, and only the file system can encrypt them.

    One process opens the files at a time. Any of its threads may call, but with a policy of your
    own a call beside another is refused (`ConcurrentUse`). A block costs two system calls each
    way, on a thread of the tier; a slot costs some 95 bytes of memory, with the policy `tuned` some
    215. With `engine` "io_uring" 32 blocks are under way at a time, through up to 64 MiB
    of the tier's memory, or that of two rows if they are larger.
    """

    is_private = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        rows: Any,
        capacity: int | str,
        *,
        namespace: str | bytes = b"",
        policy: PolicyName | Policy = "tuned",
        timeout: float = 5.0,
        direct: bool | None = None,
        opener: str = "0",
        margin: int | str | None = None,
        quota: int | str | float | None = None,
        ttl: float | None = None,
        name: str | None = None,
    ) -> None:
        """Args:
            path: a folder; it is made if it is missing.
            rows, namespace, timeout: as of every `Tier`; timeout in seconds. Blocks of other
                namespaces are overwritten first.
            capacity: bytes on disk, as a number or as text with KiB, MiB, GiB or TiB. Where the
                disk has less, that is the capacity, with a warning.
            policy: as of `BlockPool`. An object sees digests of 24 bytes.
            direct: whether to go past the page cache (O_DIRECT). None: if rows are a multiple of
                4096 bytes and the disk takes such a read and write; else the log says why.
            opener: names the pair of files in the folder; tiers that are open at the same time
                need different ones.
            margin: bytes of the disk that stay free, as `capacity`. None: 5 % of it, at most 1 GiB.
            quota: the most that blocks of this namespace take of the capacity, in bytes as
                `capacity`, or as a share (a float below 1): beyond it they evict each other, and
                what other namespaces have stored in these files stays. None: all of it.
            ttl: seconds, at least 1, after which a block is a miss and its slot is free, counted
                in whole seconds of the system's clock, also while the tier is closed. None: never.
            name: what people call the tier; commands and metrics show it.

        Raises:
            InvalidType, InvalidArgument: an argument is not valid, or the capacity is below one
                row.
            TierInUse: another tier has the files.
            SegmentRefused: there are other files of that name, or another user's.
            LayoutMismatch: the files have another format version.
            Unsupported: `direct` is True, and the file system does not support it.
            OutOfMemory: the disk has no space for a row beside the margin.
            SystemFault: the system refuses something.
        """
        held = Rows(rows)
        if held.nbytes > _MOST_ROW_BYTES:
            raise InvalidArgument(f"a row must have at most 1 GiB, not {held.nbytes} bytes")
        nbytes = capacity_in_bytes(capacity)
        slots = min(_MOST_SLOTS, _native.slots_in(nbytes, held.nbytes))
        if slots < 1:
            raise InvalidArgument(f"capacity must hold a row of {held.nbytes} bytes, not {nbytes}")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", text("opener", opener)):
            raise InvalidArgument(
                f"opener must be 1 to 64 letters, digits, _, - or ., not {opener!r}"
            )
        kept_free = capacity_in_bytes(margin, "margin", 0) if margin is not None else None
        self._namespace: Namespace = Namespace(namespace)
        checked_policy(policy)
        if direct not in (None, True, False):
            raise InvalidType(f"direct must be True, False or None, not {direct!r}")
        folder = path_from("path", path)
        if folder.encode(errors="replace").decode() != folder:
            raise InvalidArgument(f"path must be UTF-8, not {folder!r}")
        self._timeout = seconds_of(timeout)
        own, share = (0, 0.0) if quota is None else _quota(quota, nbytes, slots, held.nbytes)
        oldest = 0 if ttl is None else _whole_seconds(ttl)
        self.name = checked_label(name)
        self._rows = held
        if direct is None and held.nbytes % _PAGE:
            direct = False
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise system_fault(error.errno or 0, f"cannot make the folder {folder}") from None
        self._native = _native.DiskTier(
            *(folder, opener, rows, held.count, held.nbytes, slots, self._namespace.id),
            *(direct, kept_free, _THREADS, _MAY_RING, policy),
            *(oldest, own, share),
        )
        self._facts = self._native.facts()
        show(self._native, self.name)
        self._reports = Reports(self._native)
        self._folder = folder
        self._logged: dict[str, _Logged] = {}  # by the line
        self._warn_of(folder, self._facts)

    def _warn_of(self, folder: str, facts: dict[str, Any]) -> None:
        size = facts["slot_bytes"]
        if facts["slots"] < facts["wanted_slots"]:
            has, wanted = facts["slots"] * size, facts["wanted_slots"] * size
            left = facts["margin"]
            line = "%s has room for %d bytes of blocks beside %d that stay free; %d were asked for"
            warn(line, folder, has, left, wanted)
        if facts["is_indirect"]:
            wants = facts["alignment"]
            why = f"needs multiples of {wants} bytes" if wants else "is refused"
            warn("the tier in %s uses the page cache: direct I/O there %s", folder, why)
        if facts["copies_on_write"]:
            line = "%s copies what it writes (btrfs), so its space is not reserved; stores may fail"
            warn(line, folder)
        if facts["is_memory"]:
            warn("%s is a tmpfs: the tier would store blocks in memory, not on a disk", folder)
        if facts["refused"]:
            why = os.strerror(facts["refused"])
            warn(
                "could not reserve disk space for the tier in %s (%s); stores may fail", folder, why
            )
        if facts["unwatched"]:
            why = os.strerror(facts["unwatched"])
            line = "cannot watch the folder of the tier in %s (%s): `memlane tier` cannot empty it"
            warn(line, folder, why)
        if facts["was_damaged"]:
            warn("the first page of the tier in %s is damaged: its blocks are dropped", folder)
        if facts["other_row_bytes"]:
            was = facts["other_row_bytes"]
            warn(
                "the tier in %s was written with rows of %d bytes, now %d: its blocks are dropped",
                folder,
                was,
                self._rows.nbytes,
            )

    # Keys ------------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Returns for each key whether it can be loaded now. While the disk does not answer, none
        can. Raises `Closed`, `WrongProcess`, `InvalidType`, `InvalidArgument`."""
        return [*self._native.has(self._namespace.digests(keys))]

    def peek(self, keys: Sequence[bytes]) -> list[bool | None]:
        return [*self._native.has(self._namespace.digests(keys), is_lookup=False)]

    def hold(self, keys: Sequence[bytes]) -> TierPin:
        pinned, there = self._native.hold(self._namespace.digests(keys))
        return TierPin(there, pinned.release)  # which keeps `pinned`, and so the blocks

    def touch(self, keys: Sequence[bytes]) -> None:
        self._native.touch(self._namespace.digests(keys))

    def digests(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns what `changes` calls these keys, in the present epoch. Raises `InvalidType`,
        `InvalidArgument`."""
        return self._namespace.digests(keys)

    def changes(self) -> list[tuple[bytes, bool]]:
        """Returns the digests of blocks that were stored (True), or are not found any more (False),
        since the last call, in that order; b"" stands for all blocks. The first call only begins to
        note them: from then on call it often, as they are kept until then. Raises `Closed`,
        `WrongProcess`."""
        return self._native.changes()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Removes these keys, also for a later restart; what is being stored under them is not
        kept either. Waits until they are erased, at most the tier's `timeout`. Nothing is flushed:
        after a power cut they may be back, and after a kill those that the system was writing at
        that moment.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `has`.
            SystemFault: the disk refuses it, and they are not found until a restart; or, ETIMEDOUT,
                it does not answer, and erases them once it does.
        """
        self._wait_until_erased(self._begin_to_forget(keys), Deadline(self._timeout))

    def clear(self) -> None:
        """Removes everything, of all namespaces, also for a later restart. Loads under way may
        miss; what is being stored is not kept. Waits as `forget`. After a power cut it may all be
        back.

        Raises:
            Closed, WrongProcess: as `has`.
            SystemFault: as `forget`.
        """
        self._wait_until_erased(self._begin_to_clear(), Deadline(self._timeout))

    def _begin_to_forget(self, keys: Sequence[bytes]) -> _native.DiskOrder:
        return self._native.forget(self._namespace.digests(keys))

    def _begin_to_clear(self) -> _native.DiskOrder:
        return self._native.clear()

    def _wait_until_erased(self, order: _native.DiskOrder, deadline: Deadline) -> None:
        error, where = self._native.wait(order, deadline.left()), self._folder
        if error == errno.ETIMEDOUT:
            what = f"the disk of the tier in {where} does not answer; it will erase blocks later"
            raise system_fault(error, what)
        if error:
            what = f"the disk of the tier in {where} does not erase blocks; a restart may find them"
            raise system_fault(error, what)

    # Blocks ----------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        return self._begin(self._native.store, keys, ids, timeout)

    def store_evicted(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        return self._begin(partial(self._native.store, is_access=False), keys, ids, timeout)

    def load(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        return self._begin(self._native.load, keys, ids, timeout)

    def _begin(
        self,
        begin: Callable[[list[bytes], bytes, float], int],
        keys: Sequence[bytes],
        ids: npt.ArrayLike,
        timeout: float | None,
    ) -> Ticket:
        digests = self._namespace.digests(keys)
        rows = self._rows.ids(len(digests), ids).tobytes()
        return Ticket(
            begin(digests, rows, self._timeout if timeout is None else seconds_of(timeout))
        )

    def poll(self) -> list[Done]:
        return self._reports.take(self._collect)

    def _collect(self) -> None:
        self._native.poll(self._reports, _report)
        self._warn_of_trouble()

    def fileno(self) -> int:
        return self._native.fileno()

    # Facts -----------------------------------------------------------------------------------

    def _troubles(self) -> Iterator[tuple[str, int, str]]:
        """Yields what may be wrong with the disk: a line for the log, how often it was seen, and
        what is counted there."""
        detached, stalled, unerased, corrupt, refused = self._native.alerts()
        where = self._folder
        line = (
            f"the files of the tier in {where} were deleted or moved: a restart will not find its "
            "blocks, and their space is free again only when the tier is closed"
        )
        yield line, int(detached), "times"
        line = f"the tier in {where} does not answer: nothing is stored or loaded until it does"
        yield line, stalled, "times"
        line = f"the tier in {where} does not erase blocks: its disk does not answer"
        yield line, unerased, "times"
        line = f"the tier in {where} has found blocks that are not what was stored"
        yield line, corrupt, "blocks"
        for is_store, error, count in refused:
            verb, why = "store" if is_store else "load", os.strerror(error)
            yield f"the tier in {where} cannot {verb} blocks: {why}", count, "blocks"

    def _warn_of_trouble(self) -> None:
        """Logs each trouble when it is first seen, and at most once a minute how often since."""
        now = time.monotonic()
        for line, count, unit in self._troubles():
            logged = self._logged.get(line, _Logged(-math.inf, 0))
            if count == logged.times or now < logged.at + _QUIET:
                continue
            self._logged[line] = _Logged(now, count)  # first, because a handler may raise
            if logged.times:
                more, seconds = count - logged.times, now - logged.at
                warn("%s (%d more %s in %.0f s)", line, more, unit, seconds)
            else:
                warn("%s", line)

    @property
    def used(self) -> int:
        """The bytes of the slots that have a block. Raises `Closed`, `WrongProcess`."""
        blocks: int = self._native.statistics()["blocks"]
        size: int = self._facts["slot_bytes"]
        return blocks * size

    @property
    def is_direct(self) -> bool:
        """True if reads and writes go past the page cache."""
        return bool(self._facts["is_direct"])

    @property
    def engine(self) -> Engine:
        """The way that blocks are moved: "io_uring", on one thread past the page cache, where the
        system allows it; else "threads", which use pread and pwrite.
        """
        engine: Engine = self._facts["engine"]
        return engine

    def statistics(self) -> DiskStatistics:
        """Returns its counters and its current state. Raises `Closed`, `WrongProcess`."""
        self._native.collect(wakes=True)
        now = self._native.statistics()
        size = self._facts["slot_bytes"]
        return DiskStatistics(
            capacity=now["slots"] * size,
            used=now["blocks"] * size,
            slots=now["slots"],
            blocks=now["blocks"],
            recovered=now["recovered"],
            stored=now["stored"],
            loaded=now["loaded"],
            missed=now["missed"],
            declined=now["declined"],
            evicted=now["evicted"],
            errors=now["store_errors"] + now["load_errors"],
            corrupt=now["load_corrupt"],
            expired=now["store_expired"] + now["load_expired"],
            queue=now["queue"],
            store_latency=Latency(now["store_p50"], now["store_p99"]),
            load_latency=Latency(now["load_p50"], now["load_p99"]),
            stalled=now["stalled"],
            engine=self.engine,
            retired=now["retired"],
            detached=now["detached"],
            lookups=now["lookups"],
            found=now["found"],
            written=now["written"],
        )

    # Life ------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        ready = select.poll()
        ready.register(self.fileno(), select.POLLIN)
        ready.register(self._native.idle_fileno(), select.POLLIN)  # another thread may poll
        try:
            # A report that nobody takes would make the descriptor readable all the time.
            while not self._native.collect(wakes=False):
                if deadline.has_passed():
                    return False
                ready.poll(1000 * deadline.left(3600))
            return True
        finally:
            self._native.collect(wakes=True)

    def close(self, timeout: float | None = None) -> None:
        deadline = Deadline(self._timeout if timeout is None else timeout)
        with contextlib.suppress(Closed, WrongProcess):
            if deadline.left():
                self._native.wait(self._native.keep_uses(), deadline.left())
            while self.drain(deadline.left()):
                if self._native.close():
                    return
            raise TimedOut("a disk tier has work under way; its rows must not be freed", timeout)

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            with contextlib.suppress(TimedOut):  # then native code keeps the rows for ever
                self.close()


def _quota(quota: int | str | float, capacity: int, slots: int, row: int) -> tuple[int, float]:
    """Returns a quota as slots, at least one, or as a share of those that the disk has."""
    if isinstance(quota, float):
        if not 0 < quota < 1:
            raise InvalidArgument(f"quota must be bytes, or a share between 0 and 1, not {quota!r}")
        return 0, quota
    nbytes = capacity_in_bytes(quota, "quota")
    if nbytes < row:
        raise InvalidArgument(f"quota must hold a row of {row} bytes, not {nbytes}")
    return max(1, min(slots, slots * nbytes // capacity)), 0.0


def _whole_seconds(ttl: float) -> int:
    seconds = seconds_of(ttl)
    if not 1 <= seconds < 1 << 32:
        raise InvalidArgument(f"ttl must be seconds, at least 1, not {ttl!r}")
    return int(seconds)


def _report(ticket: int, ok: bytes, kind: int, error: int, nbytes: int, seconds: float) -> Done:
    why = os.strerror(error) if error else _WHY[kind]
    return Done(Ticket(ticket), np.frombuffer(ok, np.bool_), why, nbytes, seconds)
