"""A pool and the tiers behind it: what is evicted is stored, and what is missing is loaded.

The chain has no thread. Tiers work by themselves; the chain takes their reports in its own calls
and in the pool's `reserve`, and all that follows from them happens there, under one lock.

An evicted block is not copied. The pool has spare blocks: it hands one of them to the new key, and
the evicted block stays aside, with its bytes, until the tiers have reported it; then it is spare.

A signal's handler may raise anywhere, so nothing is counted that could be wrong afterwards: what is
under way is what the jobs say, a job ends last, and the lock is taken by `with` alone.

    job         its rows are              until
    begun       the tier's                its report; or, if that is lost, a poll after its deadline
    orphan      perhaps the tier's        a poll after its deadline: its call has raised
    ended       the pool's again          it is removed

A tier is done with rows once it has been polled after the deadline, and not before.
"""

from __future__ import annotations

import os
import select
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import itemgetter
from types import TracebackType
from typing import Any, Literal, Self, get_args
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.diagnosis import warn
from memlane._locks import Lock
from memlane.errors import (
    Closed,
    ConcurrentUse,
    InvalidArgument,
    InvalidType,
    MemlaneError,
    TimedOut,
    Unsupported,
    WrongProcess,
)
from memlane.tiers.pool import Backing, BlockPool, Pin, Reservation
from memlane.tiers.tier import CHANGED, Done, Namespace, Rows, Ticket, Tier, has_epochs
from memlane.tiers.waiting import LONGEST_PAUSE, Outage, Wakeup

Admission = Literal["all", "second"]
Kind = Literal["store", "load"]
Flags = npt.NDArray[np.bool_]

_AT_A_TIME = 64  # blocks of a load; what it has loaded is found when all of them are reported
_REMEMBERED = 4  # times the pool: keys of which `second` knows that they were evicted once
_MOST_WAIT = 3600.0  # seconds, of one wait
_FOREVER = float("inf")
_GRACE = 1.0  # seconds after its deadline that a tier has for its report


@dataclass(frozen=True)
class TierUse:
    """What a chain has done with one of its tiers since it was made.

    Attributes:
        name: of its class.
        stored, loaded: blocks.
        missed: blocks that were asked for, and were not there in time, or not as they were stored.
        failed: blocks that it did not store, or declined.
        skipped: blocks that it was not asked to store, because it was busy with others.
        bytes_stored, bytes_loaded: of blocks, in bytes.
        storing_seconds, loading_seconds: that something was under way.
        is_left_out: whether it has failed, and is not asked for now, to store or to load.
    """

    name: str
    stored: int
    loaded: int
    missed: int
    failed: int
    skipped: int
    bytes_stored: int
    bytes_loaded: int
    storing_seconds: float
    loading_seconds: float
    is_left_out: bool


@dataclass(frozen=True)
class ChainStatistics:
    """Of a chain since it was made, and now.

    Attributes:
        hits: keys that `fetch` found in the pool at once.
        loaded: blocks that came from the tiers.
        recalled: blocks that were evicted, and wanted again before they were stored.
        dropped: blocks that were evicted while no block was spare, and that no tier said it had:
            they are lost. The log has a line for the first, and then one a minute.
        declined: blocks that the admission did not want to be stored.
        spare: blocks that what is evicted next can stay in, now.
        storing, loading: blocks under way, now.
        tiers: of each, in their order.
    """

    hits: int
    loaded: int
    recalled: int
    dropped: int
    declined: int
    spare: int
    storing: int
    loading: int
    tiers: tuple[TierUse, ...]


@dataclass(eq=False)
class _Flush:
    """A call that stores the blocks of the pool."""

    has_failed: bool = False


@dataclass(eq=False)
class _Job:
    """What a tier was asked for. Its rows are its own until it ends: those of a store are aside in
    the pool, or pinned by a flush, those of a load reserved."""

    kind: Kind
    keys: list[bytes]
    rows: list[int]
    begun: float = 0.0
    due: float = 0.0  # by then its report has come, if the tier is polled
    reservation: Reservation | None = None
    flush: _Flush | None = None  # that it belongs to, instead of an eviction
    pinned: object = None  # what keeps the rows of a flush
    revoked: set[bytes] = field(default_factory=set)  # keys that were forgotten meanwhile
    is_ended: bool = False  # the tier is done with its rows


@dataclass(eq=False)
class _Search:
    """Keys of which some tier does not know yet whether it has them. Nothing is reserved for them
    until it does."""

    keys: list[bytes]
    unknown: set[bytes]
    due: float  # from then on they count as missing


class _Ban:
    """Keys that are neither stored nor loaded, because they are being forgotten; None: all."""

    def __init__(self, keys: set[bytes] | None) -> None:
        self.keys = keys


class _Link:
    """One of the tiers, and what it was asked for.

    Attributes:
        jobs: by ticket.
        orphans: jobs whose call has raised, so that there is no ticket: perhaps the tier has begun
            them.
    """

    def __init__(self, tier: Tier, place: int, timeout: float) -> None:
        self.tier = tier
        self.place = place
        self.name = type(tier).__name__
        self.is_read_only = getattr(tier, "is_read_only", False)
        self.stores_once = getattr(tier, "stores_once", False)
        self.logs_outages = getattr(tier, "logs_outages", False)
        self.jobs: dict[Ticket, _Job] = {}
        self.orphans: list[_Job] = []
        self.reports: deque[Done] = deque()
        self.counts: Counter[str] = Counter()
        self.seconds: dict[Kind, float] = {"store": 0.0, "load": 0.0}
        # A disk that is full can still be read.
        self.outages: dict[Kind, Outage] = {"store": Outage(), "load": Outage()}
        self.poll_outage = Outage()
        self._is_closed = False
        self._polled = -_FOREVER  # when the last poll began that has returned
        self._timeout = timeout
        self._counted: dict[Kind, float] = {"store": 0.0, "load": 0.0}  # until then, in `seconds`

    @property
    def all_jobs(self) -> list[_Job]:
        return [job for job in (*self.jobs.values(), *self.orphans) if not job.is_ended]

    def storing(self) -> int:
        return sum(len(job.rows) for job in self.all_jobs if job.kind == "store")

    def fail(self, kind: Kind, why: str, now: float) -> None:
        is_out = any(each.lasts(now) for each in self.outages.values())
        if self.outages[kind].begin(now) and not is_out and not self.logs_outages:
            warn("tier %s failed and is skipped for a while: %s", self.name, why)

    def has(self, keys: list[bytes], kind: Kind, now: float) -> list[bool | None]:
        """As the tier's; nothing is there while it is left out."""
        absent: list[bool | None] = [False] * len(keys)
        if not keys or self.outages[kind].lasts(now):
            return absent
        try:
            found = [*self.tier.has(keys)]
        except Exception as error:
            self.fail(kind, _text(error), now)
            return absent
        if len(found) != len(keys):
            return absent
        return [None if each is None else bool(each) for each in found]

    def hold(self, keys: list[bytes], until: ExitStack, now: float) -> None:
        """Keeps what is there from eviction, as far as the tier can."""
        try:
            until.enter_context(self.tier.hold(keys))
        except Exception as error:
            self.fail("load", _text(error), now)

    def begin(self, job: _Job) -> bool:
        """False: it has raised."""
        job.begun = time.monotonic()  # what came before may have taken its time
        job.due = job.begun + self._timeout + _GRACE
        self.orphans.append(job)
        begin = self.tier.store if job.kind == "store" else self.tier.load
        try:
            ticket = begin(job.keys, job.rows, self._timeout)
        except Exception as error:
            self.fail(job.kind, _text(error), job.begun)
            return False
        finally:
            job.due = time.monotonic() + self._timeout + _GRACE
        if ticket not in self.jobs:
            self.jobs[ticket] = job
            self.orphans.remove(job)
        return True

    def collect(self, now: float) -> None:
        """Takes reports from the tier."""
        if self.poll_outage.lasts(now):
            return
        begun = time.monotonic()
        try:
            for done in self.tier.poll():
                if _is_report(done):
                    self.reports.append(done)
                else:
                    self._fail_all("a report is not a Done", now)
            self._polled = begun
            self.poll_outage.end()
        except Closed as error:  # it has nothing under way
            self._is_closed = True
            for ticket, job in self.jobs.items():
                nothing = np.zeros(len(job.keys), np.bool_)
                self.reports.append(Done(ticket, nothing, str(error), 0, 0.0))
        except Exception as error:
            self.poll_outage.begin(now)
            self._fail_all(_text(error), now)

    def _fail_all(self, why: str, now: float) -> None:
        for kind in get_args(Kind):
            self.fail(kind, why, now)

    def overdue(self) -> list[_Job]:
        """Jobs without a report, as all orphans are, and those whose report an exception has
        lost."""
        return [job for job in self.all_jobs if self._is_closed or job.due <= self._polled]

    def remove(self, job: _Job) -> None:
        self.jobs = {ticket: each for ticket, each in self.jobs.items() if each is not job}
        self.orphans = [each for each in self.orphans if each is not job]

    def wakes_at(self) -> float:
        """When there may be something to do without a report."""
        return self.poll_outage.until or min([_FOREVER, *(job.due for job in self.all_jobs)])

    def record(self, job: _Job, ok: Flags, done: Done, now: float) -> None:
        """What came of it."""
        ended = job.begun + done.seconds
        self.seconds[job.kind] += max(0.0, ended - max(job.begun, self._counted[job.kind]))
        self._counted[job.kind] = max(ended, self._counted[job.kind])
        good = int(ok.sum())
        is_store = job.kind == "store"
        self.counts["stored" if is_store else "loaded"] += good
        self.counts["failed" if is_store else "missed"] += len(ok) - good
        self.counts["bytes_stored" if is_store else "bytes_loaded"] += done.bytes
        if done.error is None or good:
            self.outages[job.kind].end()
        elif done.error != CHANGED:
            self.fail(job.kind, done.error, now)
        if done.error is not None and job.flush is not None:
            job.flush.has_failed = True


def _is_report(done: object) -> bool:
    """Of a tier of a user's, too."""
    try:
        return (
            isinstance(done, Done)
            and isinstance(done.ticket, int)
            and isinstance(int(done.bytes), int)
            and isinstance(float(done.seconds), float)
            and np.asarray(done.ok, np.bool_).ndim == 1
        )
    except (TypeError, ValueError):
        return False


def _text(error: Exception) -> str:
    """Not the error itself, whose frames a log's handler would keep."""
    return str(error) or type(error).__name__


class _SecondTime:
    """Admits a key that was evicted before, not too long ago."""

    def __init__(self, most: int) -> None:
        self._seen: OrderedDict[int, None] = OrderedDict()  # hashes
        self._most = most

    def admits(self, key: bytes) -> bool:
        number = hash(key)
        if number in self._seen:
            self._seen.move_to_end(number)
            return True
        self._seen[number] = None
        if len(self._seen) > self._most:
            self._seen.popitem(last=False)
        return False


class TierChain:
    """A pool of blocks whose content outlives its eviction, in tiers::

        pool = BlockPool(region.num_blocks)
        rows = region.create_kv_memoryview()
        with (
            DiskTier("/nvme/kv", rows, "200GiB") as disk,
            RedisTier("redis://cache:6379", rows) as server,
            TierChain(pool, rows, [disk, server]) as chain,
        ):
            chain.prefetch(keys)                     # of a request that waits for its turn
            ...
            with chain.fetch(keys, timeout=0) as pin:
                read(pin.ids)
            with pool.reserve(pin.missing) as new:   # as ever; what this evicts is stored
                for key, row in new:                 # those that got a block; not always all
                    write(key, row)
                new.commit()

    Nobody waits for a tier but `fetch`, for as long as it is told to. What comes later than that is
    found by the next call. A tier that fails, or has not answered at its deadline, is left out for
    a second, then two, four, up to a minute, and the log says so once; stores and loads are judged
    apart. A block is loaded from the first tier that has it, and stored in all that have not.

    The tiers must have been opened on the same rows, and are the chain's until it is closed: nobody
    else polls them. It does not close them. Everything is for one process; threads take turns, but
    with a policy of your own the pool refuses a call beside another. A handler that calls the chain
    while it interrupts it gets what is in the pool, and begins nothing.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: Any,
        tiers: Sequence[Tier],
        *,
        spare: int | None = None,
        admission: Admission = "all",
        timeout: float = 5.0,
    ) -> None:
        """Args:
            pool: whose blocks are the first rows.
            rows: a writable, contiguous buffer of two dimensions; kept until the chain is closed.
            tiers: the fastest first.
            spare: blocks of the pool that evicted blocks stay in while they are stored. What one
                `reserve` evicts beyond them is lost. None: an eighth of the pool.
            admission: which evicted blocks are stored: "all", or those that are evicted for the
                "second" time, where writing is dear. That remembers hashes of the keys of four
                times the pool, at less than 200 bytes each.
            timeout: of each store and load of a tier, in seconds.

        Raises:
            InvalidType, InvalidArgument: an argument is none; the pool has another chain, more
                blocks than there are rows, or none that is free to be spare.
            Closed: a tier is.
            WrongProcess: the pool is another process's.
        """
        if not isinstance(pool, BlockPool):
            raise InvalidType(f"pool must be a BlockPool, not {type(pool).__name__}")
        seconds = seconds_of(timeout)
        self._links = [_Link(tier, place, seconds) for place, tier in enumerate(tiers)]
        for link in self._links:
            if not isinstance(link.tier, Tier):
                raise InvalidType(f"tiers must be Tiers, not {link.name}")
        if not self._links:
            raise InvalidArgument("tiers must have a tier")
        if len({id(link.tier) for link in self._links}) != len(self._links):
            raise InvalidArgument("tiers must not have a tier twice")
        if admission not in get_args(Admission):
            raise InvalidArgument(f"admission must be 'all' or 'second', not {admission!r}")
        held = Rows(rows)
        blocks = pool.statistics().blocks
        if held.count < blocks:
            raise InvalidArgument(f"rows must be at least the pool's {blocks}, not {held.count}")
        wanted = max(1, blocks // 8)
        if spare is not None:
            wanted = integer_from("spare", spare, 1, max(1, blocks - 1))
        self._memory = np.frombuffer(memoryview(rows).cast("B"), np.uint8).reshape(held.count, -1)
        self._pool = pool
        self._blocks = blocks
        self._spare = wanted
        self._admission = _SecondTime(_REMEMBERED * blocks) if admission == "second" else None
        self._pid = os.getpid()
        self._lock = Lock()
        self._counts: Counter[str] = Counter()
        # Of calls under way, whose frames keep them: an exception leaves none behind.
        self._forgetting: WeakSet[_Ban] = WeakSet()
        self._waiting: WeakSet[Wakeup] = WeakSet()
        self._timeout = seconds
        self._searches: list[_Search] = []
        self._unsaid = 0  # dropped blocks that no line of the log has counted
        self._silent_until = -_FOREVER
        self._is_closing = self._is_closed = False
        self._ready = select.epoll()
        try:
            for link in self._links:
                self._ready.register(link.tier.fileno(), select.EPOLLIN)
            self._backing = Backing(pool, wanted, self._reserve)
        except BaseException:
            self._ready.close()
            raise

    # Calls -----------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], timeout: float | None = None) -> Pin:
        """Pins the leading run of keys, as `pool.pin`, and loads what is missing of it before.

        A key that had to be loaded counts as a miss, and then as a hit. What does not come in time
        is still being loaded, and found by the next call.

        Args:
            keys: as of `pool.pin`.
            timeout: seconds to wait for the tiers; None: until they have answered, or missed their
                deadlines.

        Raises:
            InvalidType, InvalidArgument: a key is not bytes, or too long; `timeout` is no number.
            Closed, WrongProcess: it is closed, or this is a forked child.
        """
        deadline = Deadline(timeout)
        self._check()
        self._advance(self._at_work())
        asked = list(keys)
        pin = self._pool.pin(asked)
        try:
            self._counts["hits"] += len(pin.ids)
            has_grown = True
            while has_grown and len(pin.ids) < len(asked):  # half of the pool at a time
                run = self._begin(asked[len(pin.ids) :], self._links)
                if not run:
                    break
                is_in_time = self._wait(partial(self._is_loaded, run), deadline)
                stored = zip(run, self._pool.has(run), strict=True)
                loaded = [key for key, _ in takewhile(itemgetter(1), stored)]
                pin.extend(self._pool.pin(loaded))
                has_grown = is_in_time and loaded == run
            return pin
        except BaseException:
            pin.release()
            raise

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Begins to load what is missing of these keys, at most half of the pool at a time. Where a
        tier does not know yet whether it has a key, a later call begins. No access.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `fetch`.
        """
        self._check()
        self._advance(self._at_work())
        self._begin(list(keys), self._links)

    def poll(self) -> None:
        """Takes what the tiers report. Does not wait. Other calls take it, too: this one is for
        whoever waits for `fileno`.

        Raises:
            Closed, WrongProcess: as `fetch`.
        """
        self._check()
        self._advance(self._links)

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to do. It is the chain's: never
        read or close it.

        Raises:
            Closed, WrongProcess: as `fetch`.
        """
        self._check()
        return self._ready.fileno()

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody finds these keys any more, neither in the pool nor in a tier. Waits for the tiers,
        as their own `forget`.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `fetch`.
            ConcurrentUse: a signal's handler has called it in the middle of another call.
            SystemFault: a tier does not answer; the keys are forgotten everywhere else.
        """
        self._check()
        asked = [*dict.fromkeys(keys)]
        self._pool.has(asked)  # checks them
        self._forget(set(asked), self._pool.forget, lambda tier: tier.forget(asked))

    def clear(self, *, epoch: str | bytes | int | None = None) -> None:
        """Empties the pool and the tiers. Waits for the tiers, as their own `clear`.

        Args:
            epoch: for new weights: their version, the same in every process that shares a tier.
                From then on blocks of another epoch are not found, in no tier, though a process
                with the old weights stores them later; shared tiers are not emptied, because such
                processes still use them. None: the epoch stays.

        Raises:
            Closed, WrongProcess: as `fetch`.
            ConcurrentUse: as `forget`.
            InvalidType: `epoch` is neither text nor bytes nor a number.
            Unsupported: a tier has no `set_epoch`; nothing has changed.
            SystemFault: a tier does not answer; all others are empty.
        """
        self._check()
        if epoch is None:
            self._forget(None, lambda _: self._pool.clear(), lambda tier: tier.clear())
        else:
            self._enter(epoch, empties=True)

    def set_epoch(self, epoch: str | bytes | int) -> None:
        """As `clear(epoch=epoch)`, but no tier is emptied: for the begin, when the tiers have
        blocks of that epoch from before.

        Raises:
            InvalidType, Unsupported, Closed, WrongProcess, ConcurrentUse, SystemFault: as `clear`.
        """
        self._check()
        self._enter(epoch, empties=False)

    def _enter(self, epoch: str | bytes | int, *, empties: bool) -> None:
        Namespace(b"").set_epoch(epoch)  # checks it
        for link in self._links:
            if not has_epochs(link.tier):
                raise Unsupported(f"a {link.name} has no epochs")

        def enter(tier: Tier) -> None:
            tier.set_epoch(epoch)
            if empties and getattr(tier, "is_private", False):
                tier.clear()

        self._forget(None, lambda _: self._pool.clear(), enter)

    def statistics(self) -> ChainStatistics:
        """Counts since it was made, and how it is now.

        Raises:
            Closed, WrongProcess: as `fetch`.
        """
        self._check()
        with self._lock:
            now = time.monotonic()
            storing = {row for job in self._jobs("store") for row in job.rows}
            return ChainStatistics(
                hits=self._counts["hits"],
                loaded=sum(link.counts["loaded"] for link in self._links),
                recalled=self._counts["recalled"],
                dropped=self._counts["dropped"],
                declined=self._counts["declined"],
                spare=self._spare - len(self._kept_rows()),
                storing=len(storing),
                loading=len(self._loading()),
                tiers=tuple(
                    TierUse(
                        name=link.name,
                        stored=link.counts["stored"],
                        loaded=link.counts["loaded"],
                        missed=link.counts["missed"],
                        failed=link.counts["failed"],
                        skipped=link.counts["skipped"],
                        bytes_stored=link.counts["bytes_stored"],
                        bytes_loaded=link.counts["bytes_loaded"],
                        storing_seconds=link.seconds["store"],
                        loading_seconds=link.seconds["load"],
                        is_left_out=any(each.lasts(now) for each in link.outages.values()),
                    )
                    for link in self._links
                ),
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Stores the blocks of the pool in every tier that does not have them, whatever
        `admission` is, and waits for it. `close` does the same.

        Args:
            timeout: seconds to wait; None: until the tiers have answered, or missed their
                deadlines.

        Returns:
            False if not all were stored: the time was too short, or a tier failed. A block that a
            tier declines or evicts counts as stored.

        Raises:
            InvalidType, InvalidArgument: `timeout` is no number.
            Closed, WrongProcess: as `fetch`.
            ConcurrentUse: as `forget`.
        """
        deadline = Deadline(timeout)
        self._check()
        if self._is_interrupted:
            raise ConcurrentUse("this chain is in the middle of another call of this thread")
        return self._flush(deadline)

    def close(self, timeout: float | None = None, *, store: bool = True) -> None:
        """Stores the blocks of the pool, as `flush`, and waits until nothing is under way. The pool
        is as any other from then on, and the rows are the caller's. Closing it again does nothing.
        A `with` block that ends by an exception closes without storing.

        Args:
            timeout: in seconds; None: until the tiers have answered, or missed their deadlines.
            store: False: the blocks of the pool are not stored, only what was evicted before.

        Raises:
            TimedOut: something is still under way; the rows must stay. Nothing is stored or loaded
                any more; close it again.
            InvalidType, InvalidArgument: `timeout` is no number.
        """
        deadline = Deadline(timeout)
        if self._is_closed or os.getpid() != self._pid:
            return
        stores = store and not self._is_closing and not self._is_interrupted
        if stores and not self._flush(deadline):
            warn("a tier chain was closed before every block of its pool was stored")
        with self._lock:
            self._is_closing = True
            self._backing.end()
        if not self._wait(lambda: not any(link.all_jobs for link in self._links), deadline):
            raise TimedOut("a tier chain has blocks under way; its rows must not be freed", timeout)
        with self._lock:
            if not self._is_closed:
                self._reclaim()
                self._is_closed = True
                self._memory = self._memory[:0, :0].copy()
                self._ready.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close(store=kind is None)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcess("this chain belongs to the process that made it")
        if self._is_closing:
            raise Closed("this chain is closed")

    # What is under way -------------------------------------------------------------------------

    def _at_work(self) -> list[_Link]:
        if self._searches:
            return self._links
        return [link for link in self._links if link.all_jobs]

    def _jobs(self, kind: Kind) -> list[_Job]:
        return [job for link in self._links for job in link.all_jobs if job.kind == kind]

    def _kept_rows(self) -> set[int]:
        """Returns the rows of evicted blocks that are still being stored."""
        return {row for job in self._jobs("store") if job.flush is None for row in job.rows}

    def _loading(self) -> set[bytes]:
        return {key for job in self._jobs("load") for key in job.keys if key not in job.revoked}

    def _aside(self) -> dict[bytes, int]:
        """Where a block is that was evicted, and is being stored."""
        return {
            key: row
            for job in self._jobs("store")
            if job.flush is None
            for key, row in zip(job.keys, job.rows, strict=True)
            if key not in job.revoked
        }

    def _is_loaded(self, keys: list[bytes]) -> bool:
        """Whether no answer about these keys, and no report of a load, is still expected."""
        now = time.monotonic()
        wanted = set(keys)
        if not all(wanted.isdisjoint(search.unknown) for search in self._searches):
            return False
        return all(
            job.kind == "store" or wanted.isdisjoint(job.keys)
            for link in self._links
            if not link.poll_outage.lasts(now)
            for job in link.all_jobs
        )

    def _reclaim(self) -> None:
        """What nobody stores any more is spare again."""
        unused = self._backing.aside() - self._kept_rows()
        if unused:
            self._backing.reuse(unused)
        if self._is_closing:
            self._backing.give_up()

    # Waiting -----------------------------------------------------------------------------------

    @property
    def _is_interrupted(self) -> bool:
        """Whether this is called by a signal's handler, or by a tier, in the middle of a change:
        this thread has the lock already."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]

    def _wait(self, is_done: Callable[[], bool], deadline: Deadline) -> bool:
        """Takes reports until that is so, or the deadline."""
        if self._is_interrupted:
            return is_done()
        bell: Wakeup | None = None
        try:
            while True:
                self._advance(self._links)
                with self._lock:
                    if is_done():
                        return True
                now = time.monotonic()
                if deadline.end <= now:
                    return False
                if bell is None:
                    bell = Wakeup()
                    self._waiting.add(bell)
                    continue  # for what another thread took before there was a bell
                ready = select.poll()
                ready.register(bell.descriptor, select.POLLIN)
                for link in self._links:
                    is_at_work = self._searches or link.all_jobs
                    if is_at_work and not link.poll_outage.lasts(now):
                        with suppress(MemlaneError):  # it is closed: the next turn ends its jobs
                            ready.register(link.tier.fileno(), select.POLLIN)
                dues = [search.due for search in [*self._searches]]
                until = min([deadline.end, *dues, *(link.wakes_at() for link in self._links)])
                ready.poll(1000 * min(_MOST_WAIT, max(0.0, until - now)))
                bell.clear()
        finally:
            if bell is not None:
                self._waiting.discard(bell)

    def _advance(self, links: list[_Link]) -> None:
        """Takes the reports of these tiers."""
        if self._is_interrupted:
            return
        has_any = False
        try:
            with self._lock:
                now = time.monotonic()
                for link in links:
                    link.collect(now)
                    while link.reports:
                        has_any = True
                        self._take(link, link.reports[0], now)
                        link.reports.popleft()
                    for job in link.overdue():
                        has_any = True
                        link.fail(job.kind, "it has not reported at its deadline", now)
                        if job.flush is not None:
                            job.flush.has_failed = True
                        self._end(link, job, np.zeros(len(job.keys), np.bool_), now)
                        link.remove(job)
                has_any |= self._go_on(now)
                if has_any or self._backing.aside() != self._kept_rows():
                    self._reclaim()
        finally:
            if has_any:
                for bell in [*self._waiting]:
                    bell.wake()

    def _take(self, link: _Link, done: Done, now: float) -> None:
        job = link.jobs.get(done.ticket)
        if job is None:
            return
        if not job.is_ended:
            ok = np.zeros(len(job.keys), np.bool_)
            if len(done.ok) == len(ok):
                ok = np.asarray(done.ok, np.bool_)
                link.record(job, ok, done, now)
            else:
                link.fail(job.kind, "a report has another length than its call", now)
                if job.flush is not None:
                    job.flush.has_failed = True
            self._end(link, job, ok, now)
        link.jobs.pop(done.ticket, None)  # last: until then it may be taken again

    def _end(self, link: _Link, job: _Job, ok: Flags, now: float) -> None:
        """The tier is done with the rows of the job."""
        if job.reservation is None or not job.keys:
            job.is_ended = True
            job.pinned = None
            if job.reservation is not None:
                job.reservation.release()
            return
        wanted = np.array([not self._is_forgotten(job, key) for key in job.keys], np.bool_)
        good = {job.keys[at] for at in np.flatnonzero(ok & wanted)}
        with suppress(InvalidArgument):  # it was committed, and then interrupted
            job.reservation.commit([key in good for key in job.reservation.keys])
        job.is_ended = True
        missing = [job.keys[at] for at in np.flatnonzero(wanted & ~ok)]
        if missing:
            self._load_run(missing, self._links[link.place + 1 :], now)

    def _is_forgotten(self, job: _Job, key: bytes) -> bool:
        return key in job.revoked or self._is_banned(key)

    def _is_banned(self, key: bytes) -> bool:
        return any(ban.keys is None or key in ban.keys for ban in self._forgetting)

    # Storing -----------------------------------------------------------------------------------

    def _reserve(self, keys: list[bytes]) -> Reservation:
        """`BlockPool.reserve`, while the pool has this chain."""
        is_interrupted = self._is_interrupted
        self._advance(self._at_work())
        with self._lock:
            if not is_interrupted:
                self._revoke_loads({*keys})
            # What is evicted in the middle of another change is lost, and spare later.
            return self._reserve_now(keys, None if is_interrupted else time.monotonic())

    def _revoke_loads(self, keys: set[bytes]) -> None:
        """A caller that computes a block does not wait for a load of it, which then is dropped."""
        for job in self._jobs("load"):
            revoked = [key for key in job.keys if key in keys and key not in job.revoked]
            if revoked:
                job.revoked.update(revoked)
                self._pool.forget(revoked)

    def _reserve_now(self, keys: list[bytes], now: float | None) -> Reservation:
        made, evicted = self._backing.reserve(keys)
        if evicted and now is not None:
            self._store_evicted(evicted, now)
        return made

    def _store_evicted(self, evicted: list[tuple[bytes, int]], now: float) -> None:
        """Stores blocks that were evicted, from the rows that keep their bytes; -1: none does."""
        kept = [each for each in evicted if each[1] >= 0]
        dropped = [key for key, row in evicted if row < 0]
        for link in self._links if dropped else ():
            known = link.has(dropped, "store", now)
            dropped = [key for key, has in zip(dropped, known, strict=True) if has is not True]
        if dropped:
            self._drop(len(dropped), now)
        wanted = [each for each in kept if not self._is_banned(each[0])]
        if self._admission is not None:
            wanted = [each for each in wanted if self._admission.admits(each[0])]
            self._counts["declined"] += len(kept) - len(wanted)
        for link in self._links:
            if link.is_read_only:
                continue
            busy = link.storing() if len(self._links) > 1 else 0
            # One that is slow must leave some to the others.
            room = max(0, self._spare // 2 - busy) if busy else self._spare
            link.counts["skipped"] += max(0, len(wanted) - room)
            self._store(link, wanted[-room:] if room else [], now)
        # Rows that no tier has taken are spare again with the next call.

    def _drop(self, blocks: int, now: float) -> None:
        self._counts["dropped"] += blocks
        self._backing.count_dropped(blocks)
        self._unsaid += blocks
        if now >= self._silent_until:
            unsaid, self._unsaid, self._silent_until = self._unsaid, 0, now + LONGEST_PAUSE
            warn(
                "a tier chain lost %d evicted blocks: others that are being stored had taken its "
                "%d spare blocks; give it a larger spare, or reserve in smaller steps",
                *(unsaid, self._spare),
            )

    def _store(
        self,
        link: _Link,
        blocks: list[tuple[bytes, int]],
        now: float,
        flush: _Flush | None = None,
        pinned: object = None,
    ) -> bool:
        """Stores what the tier does not have. Returns False if the tier is left out."""
        if not link.outages["store"].lasts(now) and not link.stores_once:
            known = link.has([key for key, _ in blocks], "store", now)
            blocks = [each for each, has in zip(blocks, known, strict=True) if has is not True]
        if link.outages["store"].lasts(now):
            return False
        if not blocks:
            return True
        keys, rows = [key for key, _ in blocks], [row for _, row in blocks]
        return link.begin(_Job("store", keys, rows, flush=flush, pinned=pinned))

    def _flush(self, deadline: Deadline) -> bool:
        flush, first = _Flush(), 0
        links = [link for link in self._links if not link.is_read_only]
        while self._wait(lambda: len(self._flushing(flush)) < 2 * len(links), deadline):
            with self._lock:
                pinned, blocks, first = self._backing.pin_stored(first, _AT_A_TIME)
                if not blocks:
                    break
                now = time.monotonic()
                wanted = [each for each in blocks if not self._is_banned(each[0])]
                for link in links:
                    flush.has_failed |= not self._store(link, wanted, now, flush, pinned)
        is_in_time = self._wait(lambda: not self._flushing(flush), deadline)
        return is_in_time and not blocks and not flush.has_failed

    def _flushing(self, flush: _Flush) -> list[_Job]:
        return [job for job in self._jobs("store") if job.flush is flush]

    # Loading -----------------------------------------------------------------------------------

    def _begin(self, keys: list[bytes], links: list[_Link]) -> list[bytes]:
        """As `_load_run`, but nothing in the middle of another change."""
        if self._is_interrupted or self._is_closing:
            return []
        with self._lock:
            return self._load_run(keys, links, time.monotonic())

    def _load_run(self, keys: list[bytes], links: list[_Link], now: float) -> list[bytes]:
        """Begins to load what is missing of the leading run of keys that are in the pool, on their
        way to it, or perhaps in one of these tiers. Returns that run."""
        loading = self._loading()
        stored = {key for key, is_there in zip(keys, self._pool.has(keys), strict=True) if is_there}
        coming = loading | stored
        missing = [*dict.fromkeys(key for key in keys if key not in coming)]
        room = max(0, max(1, self._blocks // 2) - len(loading))
        sources, unknown = self._sources(missing[:room], links, now)
        run = [*takewhile(lambda key: key in coming or key in sources or key in unknown, keys)]
        unknown.intersection_update(run)
        if unknown:
            search = next((each for each in self._searches if each.keys == keys), None)
            if search is None:
                self._searches.append(_Search(keys, unknown, now + self._timeout))
            else:
                search.unknown = unknown
        wanted: dict[_Link | None, list[bytes]] = {}
        for key in dict.fromkeys(run):
            if key in sources:
                wanted.setdefault(sources[key], []).append(key)
        with ExitStack() as held:  # else what is evicted now could be stored in their place
            for link, of_link in wanted.items():
                if link is not None:
                    link.hold(of_link, held, now)
            self._recall(wanted.pop(None, []), now)
            for link, of_link in wanted.items():
                if link is not None:
                    for at in range(0, len(of_link), _AT_A_TIME):
                        self._load(link, of_link[at : at + _AT_A_TIME], now)
        return run

    def _go_on(self, now: float) -> bool:
        """Looks again for what tiers did not know. Returns whether a search has ended."""
        searches, self._searches = self._searches, []
        for search in searches:
            if search.due > now and not self._is_closing:
                self._load_run(search.keys, self._links, now)
                for again in self._searches:
                    if again.keys == search.keys:
                        again.due = min(again.due, search.due)
        return len(self._searches) < len(searches)

    def _sources(
        self, keys: list[bytes], links: list[_Link], now: float
    ) -> tuple[dict[bytes, _Link | None], set[bytes]]:
        """Returns the first tier that has each key, or None if its block is still aside; and the
        keys that no tier has, but of which one does not know yet."""
        keys = [key for key in keys if not self._is_banned(key)]
        aside = self._aside() if keys else {}
        sources: dict[bytes, _Link | None] = {key: None for key in keys if key in aside}
        unknown: set[bytes] = set()
        for link in links:
            left = [key for key in keys if key not in sources]
            for key, is_there in zip(left, link.has(left, "load", now), strict=True):
                if is_there:
                    sources[key] = link
                elif is_there is None:
                    unknown.add(key)
        return sources, unknown - sources.keys()

    def _recall(self, keys: list[bytes], now: float) -> None:
        """Copies blocks back that are aside."""
        if not keys:
            return
        aside = self._aside()
        with self._reserve_now(keys, now) as made:
            for key, block in made:
                self._memory[block] = self._memory[aside[key]]
            made.commit()
            self._counts["recalled"] += len(made)

    def _load(self, link: _Link, keys: list[bytes], now: float) -> None:
        made = self._reserve_now(keys, now)
        if not len(made):  # the policy declines them, or all blocks are pinned
            return
        reserved = dict(iter(made))
        job = _Job("load", [*reserved], [*reserved.values()], reservation=made)
        if not link.begin(job):
            keys, job.keys = job.keys, []  # of which it may still write to the rows
            self._pool.forget(keys)
            self._load_run(keys, self._links[link.place + 1 :], now)

    # Forgetting --------------------------------------------------------------------------------

    def _forget(
        self,
        keys: set[bytes] | None,
        of_pool: Callable[[list[bytes]], None],
        of_tier: Callable[[Tier], None],
    ) -> None:
        """None: all keys. Until it is over they are neither stored nor loaded."""
        if self._is_interrupted:
            raise ConcurrentUse("this chain is in the middle of another call of this thread")
        failed: Exception | None = None
        ban = _Ban(keys)
        try:
            self._forgetting.add(ban)
            with self._lock:
                of_pool([*(keys or ())])
                for link in self._links:
                    for job in link.all_jobs:
                        job.revoked.update(job.keys if keys is None else keys)
            for link in self._links:
                try:
                    of_tier(link.tier)
                except Exception as error:
                    failed = failed or error
        finally:
            self._forgetting.discard(ban)
        if failed is not None:
            raise failed
