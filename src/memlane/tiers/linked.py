"""One tier of a chain, and what it was asked for: its jobs, its outages, what it has done.

    job         its rows are              until
    begun       the tier's                its report; or, if that is lost, a poll after its deadline
    orphan      perhaps the tier's        a poll after its deadline: its call has raised
    ended       the pool's again          it is removed

A tier is done with rows once it has been polled after the deadline, and not before. A signal's
handler may raise anywhere, so nothing is counted that could be wrong afterwards: what is under way
is what the jobs say, and a job ends last.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from memlane._base.diagnosis import warn
from memlane.errors import Closed
from memlane.tiers.pool import Reservation
from memlane.tiers.reports import Reports
from memlane.tiers.tier import CHANGED, Done, Ticket, Tier
from memlane.tiers.waiting import Outage

Kind = Literal["store", "load"]
Flags = npt.NDArray[np.bool_]

_FOREVER = float("inf")
_GRACE = 1.0  # seconds after its deadline that a tier has for its report


@dataclass(frozen=True)
class TierUse:
    """A chain's use of one of its tiers since the chain was created.

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


@dataclass(eq=False)
class Flush:
    """A call that stores the blocks of the pool."""

    has_failed: bool = False


@dataclass(eq=False)
class Job:
    """One request to a tier. Its rows are its own until it ends: those of a store are aside in the
    pool, or pinned by a flush, those of a load reserved."""

    kind: Kind
    keys: list[bytes]
    rows: list[int]
    begun: float = 0.0
    due: float = 0.0  # by then its report has come, if the tier is polled
    reservation: Reservation | None = None
    flush: Flush | None = None  # that it belongs to, instead of an eviction
    pinned: object = None  # what keeps the rows of a flush
    revoked: set[bytes] = field(default_factory=set)  # keys that were forgotten meanwhile
    is_ended: bool = False  # the tier is done with its rows

    def fail(self) -> None:
        """Notes for the flush that the tier has not done it."""
        if self.flush is not None:
            self.flush.has_failed = True


class Link:
    """One of the tiers, and what it was asked for.

    Attributes:
        jobs: by ticket.
        orphans: jobs whose call has raised, so that there is no ticket: perhaps the tier has begun
            them.
    """

    def __init__(self, tier: Tier, place: int, timeout: float, most_sought: int) -> None:
        self.tier = tier
        self.place = place
        self.name = type(tier).__name__
        self.is_read_only = getattr(tier, "is_read_only", False)
        self._sought: OrderedDict[bytes, None] = OrderedDict()  # misses that count already
        self._most_sought = most_sought
        self.stores_once = getattr(tier, "stores_once", False)
        self._fails_in_part = getattr(tier, "fails_in_part", False)
        self.logs_outages = getattr(tier, "logs_outages", False)
        self.jobs: dict[Ticket, Job] = {}
        self.orphans: list[Job] = []
        self.reports = Reports()
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
    def all_jobs(self) -> list[Job]:
        return [job for job in (*self.jobs.values(), *self.orphans) if not job.is_ended]

    def use(self, now: float) -> TierUse:
        """Returns its counters."""
        names = ("stored", "loaded", "missed", "failed", "skipped", "bytes_stored", "bytes_loaded")
        return TierUse(
            name=self.name,
            **{name: self.counts[name] for name in names},
            storing_seconds=self.seconds["store"],
            loading_seconds=self.seconds["load"],
            is_left_out=self.is_left_out(now),
        )

    def is_left_out(self, now: float) -> bool:
        return any(each.lasts(now) for each in self.outages.values())

    def storing(self) -> int:
        return sum(len(job.rows) for job in self.all_jobs if job.kind == "store")

    def fail(self, kind: Kind, why: str, now: float) -> None:
        is_out = self.is_left_out(now)
        if self.outages[kind].begin(now) and not is_out and not self.logs_outages:
            warn("tier %s failed and is skipped for a while: %s", self.name, why)

    def has(self, keys: list[bytes], kind: Kind, now: float) -> list[bool | None]:
        """Asks the tier which keys it has; none while it is left out."""
        absent: list[bool | None] = [False] * len(keys)
        if not keys or self.outages[kind].lasts(now):
            return absent
        has = self.tier.has
        if kind == "store":  # a tier of a user's may lack `peek`
            has = getattr(self.tier, "peek", has)
        try:
            found = [*has(keys)]
        except Exception as error:
            self.fail(kind, _text(error), now)
            return absent
        if len(found) != len(keys):
            return absent
        return [None if each is None else bool(each) for each in found]

    def seek(self, keys: list[bytes], now: float) -> None:
        """Lets the tier count that requests ask for these keys, which are not loaded from it. A
        request that asks again before they are computed is the same one."""
        fresh = [key for key in keys if key not in self._sought]
        if not fresh or self.outages["load"].lasts(now):
            return
        self._sought.update(dict.fromkeys(fresh))
        while len(self._sought) > self._most_sought:
            self._sought.popitem(last=False)
        try:
            self.tier.touch(fresh)
        except Exception as error:
            self.fail("load", _text(error), now)

    def computed(self, keys: list[bytes]) -> None:
        """Ends the search for these keys: who asks for them next is another request."""
        for key in keys if self._sought else ():
            self._sought.pop(key, None)

    def hold(self, keys: list[bytes], until: ExitStack, now: float) -> None:
        """Keeps what is there from eviction, as far as the tier can."""
        try:
            until.enter_context(self.tier.hold(keys))
        except Exception as error:
            self.fail("load", _text(error), now)

    def begin(self, job: Job) -> bool:
        """Begins the job. Returns False if the tier raised."""
        job.begun = time.monotonic()  # what came before may have taken its time
        job.due = job.begun + self._timeout + _GRACE
        self.orphans.append(job)
        begin = self.tier.load
        if job.kind == "store":  # a tier of a user's may lack `store_evicted`
            begin = getattr(self.tier, "store_evicted", self.tier.store)
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
                    self.reports.add(done)
                else:
                    self._fail_all("a report is not a Done", now)
            self._polled = begun
            self.poll_outage.end()
        except Closed as error:  # it has nothing under way
            self._is_closed = True
            for ticket, job in self.jobs.items():
                nothing = np.zeros(len(job.keys), np.bool_)
                self.reports.add(Done(ticket, nothing, str(error), 0, 0.0))
        except Exception as error:
            self.poll_outage.begin(now)
            self._fail_all(_text(error), now)

    def _fail_all(self, why: str, now: float) -> None:
        for kind in get_args(Kind):
            self.fail(kind, why, now)

    def overdue(self) -> list[Job]:
        """Returns jobs that will not be reported: orphans, and those whose report an exception has
        lost."""
        return [job for job in self.all_jobs if self._is_closed or job.due <= self._polled]

    def remove(self, job: Job) -> None:
        """Drops a job that has ended."""
        self.jobs = {ticket: each for ticket, each in self.jobs.items() if each is not job}
        self.orphans = [each for each in self.orphans if each is not job]

    def wakes_at(self) -> float:
        """Returns when there may be something to do without a report."""
        return self.poll_outage.until or min([_FOREVER, *(job.due for job in self.all_jobs)])

    def record(self, job: Job, ok: Flags, done: Done, now: float) -> None:
        """Counts what became of the job."""
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
        elif done.error != CHANGED and not self._fails_in_part:
            self.fail(job.kind, done.error, now)
        if done.error is not None:
            job.fail()


class Jobs:
    """The jobs of a chain's tiers that have not ended: the only record of what is under way, so
    that nothing can contradict it after an interrupt."""

    def __init__(self, links: list[Link]) -> None:
        self._links = links

    def of(self, kind: Kind) -> list[Job]:
        return [job for link in self._links for job in link.all_jobs if job.kind == kind]

    def of_flush(self, flush: Flush) -> list[Job]:
        return [job for job in self.of("store") if job.flush is flush]

    def storing(self) -> int:
        """Returns how many blocks are being stored."""
        return len({row for job in self.of("store") for row in job.rows})

    def kept_rows(self) -> set[int]:
        """Returns the rows of evicted blocks that are still being stored."""
        return {row for job in self.of("store") if job.flush is None for row in job.rows}

    def aside(self) -> dict[bytes, int]:
        """Returns the rows of evicted blocks that are still being stored, by key."""
        return {
            key: row
            for job in self.of("store")
            if job.flush is None
            for key, row in zip(job.keys, job.rows, strict=True)
            if key not in job.revoked
        }

    def loading(self) -> set[bytes]:
        """Returns the keys that are being loaded, but those that were forgotten meanwhile."""
        return {key for job in self.of("load") for key in job.keys if key not in job.revoked}


def _is_report(done: object) -> bool:
    """Checks a report's fields: tiers of users may return anything."""
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
    """Returns the error's text, and not the error, whose frames a log's handler would keep."""
    return str(error) or type(error).__name__
