"""A pool and the tiers behind it: what is evicted is stored, and what is missing is loaded.

The chain has no thread. Tiers work by themselves; the chain takes their reports in its own calls
and in the pool's `reserve`, and all that follows from them happens there. Its state changes under
one lock, which is never held while something is waited for.

An evicted block is not copied. The pool has spare blocks: it hands one of them to the new key, and
the evicted block stays aside, with its bytes, until the tiers have reported it; then it is spare.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter
from typing import Any, Literal, Self, get_args

import numpy as np

from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline
from memlane._base.diagnosis import warn
from memlane.errors import (
    Closed,
    InvalidArgument,
    InvalidType,
    MemlaneError,
    TimedOut,
    WrongProcess,
)
from memlane.tiers._waiting import Bell, Outage
from memlane.tiers.pool import BlockPool, Pin, Reservation
from memlane.tiers.remote import RemoteTier
from memlane.tiers.tier import CHANGED, Done, Rows, Ticket, Tier

Admission = Literal["all", "second"]
Kind = Literal["store", "load"]

_AT_A_TIME = 64  # blocks of a load; what it has loaded is found when all of them are reported
_REMEMBERED = 20  # times the pool: keys of which `second` knows that they were evicted once
_MOST_WAIT = 3600.0  # seconds, of one wait


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
        dropped: blocks that were evicted while no block was spare, and that no tier said it had.
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
class _Store:
    """Of blocks that are aside."""

    rows: list[int]
    begun: float


@dataclass(eq=False)
class _Load:
    """Into blocks that are reserved."""

    reservation: Reservation
    begun: float
    revoked: set[bytes] = field(default_factory=set)  # keys that were forgotten meanwhile


class _Link:
    """One of the tiers, and what it was asked for."""

    def __init__(self, tier: Tier, place: int) -> None:
        self.tier = tier
        self.place = place
        self.name = type(tier).__name__
        self.is_read_only = getattr(tier, "is_read_only", False)
        self.jobs: dict[Ticket, _Store | _Load] = {}
        # Jobs whose call an exception has ended: nobody knows whether the tier has begun them.
        self.unknown: list[_Store | _Load] = []
        self.storing = 0  # blocks
        self.counts: Counter[str] = Counter()
        self.seconds: dict[Kind, float] = {"store": 0.0, "load": 0.0}
        self._until: dict[Kind, float] = {"store": 0.0, "load": 0.0}  # those that are counted
        # A disk that is full can still be read.
        self.outages: dict[Kind, Outage] = {"store": Outage(), "load": Outage()}
        self.deafness = Outage()  # of `poll`
        self._reports: deque[Done] = deque()

    @property
    def is_at_work(self) -> bool:
        return bool(self.jobs or self.unknown)

    def has_failed(self, kind: Kind, why: str, now: float) -> None:
        is_out = any(each.lasts(now) for each in self.outages.values())
        if self.outages[kind].begin(now) and not is_out and not isinstance(self.tier, RemoteTier):
            # A remote tier says so itself.
            warn("a chain leaves out its %s until it answers: %s", self.name, why)

    def judge(self, kind: Kind, begun: float, done: Done, now: float) -> None:
        ended = begun + done.seconds
        self.seconds[kind] += max(0.0, ended - max(begun, self._until[kind]))
        self._until[kind] = max(ended, self._until[kind])
        if done.error is None or done.ok.any():
            self.outages[kind].end()
        elif done.error != CHANGED:
            self.has_failed(kind, done.error, now)

    def has(self, keys: list[bytes], kind: Kind, now: float) -> list[bool | None]:
        """As the tier's; nothing is there while it is left out."""
        absent: list[bool | None] = [False] * len(keys)
        if not keys or self.outages[kind].lasts(now):
            return absent
        try:
            found = [*self.tier.has(keys)]
        except Exception as error:
            self.has_failed(kind, _text(error), now)
            return absent
        return found if len(found) == len(keys) else absent

    def hold(self, keys: list[bytes], until: ExitStack, now: float) -> None:
        """What is there, as far as the tier can."""
        try:
            until.enter_context(self.tier.hold(keys))
        except Exception as error:
            self.has_failed("load", _text(error), now)

    def begin(
        self, kind: Kind, job: _Store | _Load, keys: list[bytes], rows: Any, now: float
    ) -> bool:
        """Whether the tier has begun it, or perhaps has."""
        self.unknown.append(job)
        try:
            ticket = getattr(self.tier, kind)(keys, rows)
        except Exception as error:
            self.has_failed(kind, _text(error), now)
            if not isinstance(error, MemlaneError):
                return True
            self.unknown.remove(job)  # it was refused
            return False
        self.jobs[ticket] = job
        self.unknown.remove(job)
        return True

    def next_report(self) -> tuple[_Store | _Load, Done] | None:
        while self._reports:
            done = self._reports.popleft()
            if (job := self.jobs.pop(done.ticket, None)) is not None:
                return job, done
        return None

    def listen(self, now: float) -> None:
        """Takes reports from the tier."""
        if not self.is_at_work or self.deafness.lasts(now):
            return
        try:
            self._reports.extend(self.tier.poll())
            self.deafness.end()
            if self.unknown and self.tier.drain(0):
                for job in self.unknown:
                    self.jobs[Ticket(-1 - len(self.jobs))] = job
                self.unknown = []
                self._reports.extend(self._failures(lambda ticket: ticket < 0))
        except Closed:  # so it has nothing under way
            self._reports.extend(self._failures(lambda _: True))
        except Exception as error:
            self.deafness.begin(now)
            for kind in get_args(Kind):
                self.has_failed(kind, _text(error), now)

    def _failures(self, of: Callable[[Ticket], bool]) -> list[Done]:
        return [
            Done(ticket, np.zeros(_blocks_of(job), np.bool_), "it is closed", 0, 0.0)
            for ticket, job in self.jobs.items()
            if of(ticket)
        ]


def _text(error: Exception) -> str:
    """Not the error itself, whose frames a log's handler would keep."""
    return str(error) or type(error).__name__


def _blocks_of(job: _Store | _Load) -> int:
    return len(job.rows if isinstance(job, _Store) else job.reservation.keys)


class _SecondTime:
    """Admits a key that was evicted before, not too long ago."""

    def __init__(self, most: int) -> None:
        self._seen: OrderedDict[bytes, None] = OrderedDict()
        self._most = most

    def admits(self, key: bytes) -> bool:
        if key in self._seen:
            self._seen.move_to_end(key)
            return True
        self._seen[key] = None
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
                write(new.ids)
                new.commit()

    Nobody waits for a tier but `fetch`, for as long as it is told to. What comes later than that is
    found by the next call. A tier that fails, or has not answered at its deadline, is left out for
    a second, then two, four, up to a minute, and the log says so once; stores and loads are judged
    apart. A block is loaded from the first tier that has it, and stored in all that have not.

    The tiers must have been opened on the same rows, and are the chain's until it is closed: nobody
    else polls them. It does not close them. Everything is for one process; threads take turns.
    """

    def __init__(
        self,
        pool: BlockPool,
        rows: Any,
        tiers: Sequence[Tier],
        *,
        spare: int | None = None,
        admission: Admission = "all",
    ) -> None:
        """Args:
            pool: whose blocks are the first rows.
            rows: a writable, contiguous buffer of two dimensions; kept until the chain is closed.
            tiers: the fastest first.
            spare: blocks of the pool that evicted blocks stay in while they are stored. What one
                `reserve` evicts beyond them is lost. None: an eighth of the pool.
            admission: which evicted blocks are stored: "all", or those that are evicted for the
                "second" time, where writing is dear.

        Raises:
            InvalidType, InvalidArgument: an argument is none; the pool has another chain, more
                blocks than there are rows, or none that is free to be spare.
            WrongProcess: the pool is another process's.
        """
        if not isinstance(pool, BlockPool):
            raise InvalidType(f"pool must be a BlockPool, not {type(pool).__name__}")
        self._links = [_Link(tier, place) for place, tier in enumerate(tiers)]
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
        if pool._keeper is not None:
            raise InvalidArgument("pool has a chain already")
        if blocks < 2 or pool._own().set_aside(wanted) < wanted:
            pool._own().set_aside(0)
            raise InvalidArgument(f"pool must have {wanted} free blocks, and one more, for a chain")
        self._memory = np.frombuffer(memoryview(rows).cast("B"), np.uint8).reshape(held.count, -1)
        self._pool = pool
        self._blocks = blocks
        self._spare = wanted
        self._admission = _SecondTime(_REMEMBERED * blocks) if admission == "second" else None
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._is_busy = False  # whoever has the lock is in the middle of a change
        self._counts: Counter[str] = Counter()
        self._aside: Counter[int] = Counter()  # by block: how many tiers are storing it
        self._leaving: dict[bytes, int] = {}  # where a key is aside
        self._loading: set[bytes] = set()
        self._waiting: list[Bell] = []  # of threads in `fetch` and `close`
        self._is_closing = self._is_closed = False
        self._ready = select.epoll()
        for link in self._links:
            self._ready.register(link.tier.fileno(), select.EPOLLIN)
        pool._keeper = self._reserve

    # Calls -----------------------------------------------------------------------------------

    def fetch(self, keys: Sequence[bytes], timeout: float | None = None) -> Pin:
        """Pins the leading run of keys, as `pool.pin`, and loads what is missing of it before.

        A key that had to be loaded counts as a miss, and then as a hit. What does not come in time
        is still being loaded, and found by the next call.

        Args:
            keys: as of `pool.pin`.
            timeout: seconds to wait for the tiers; None: until they have answered, or missed their
                own deadlines.

        Raises:
            InvalidType, InvalidArgument: a key is not bytes, or too long; `timeout` is no number.
            Closed, WrongProcess: it is closed, or this is a forked child.
        """
        deadline = Deadline(timeout)
        self.poll()
        pin = self._pool.pin(keys)
        self._counts["hits"] += len(pin.ids)
        if not pin.missing:
            return pin
        try:
            with self._undisturbed() as now:
                run = self._begin(pin.missing, self._links, now)
            if run:
                self._wait(lambda now: self._is_loaded(run, now), deadline)
                stored = zip(run, self._pool.has(run), strict=True)
                loaded = [key for key, _ in takewhile(itemgetter(1), stored)]
                pin.extend(self._pool.pin(loaded))
            return pin
        except BaseException:
            pin.release()
            raise

    def prefetch(self, keys: Sequence[bytes]) -> None:
        """Begins to load what is missing of these keys, at most half of the pool. No access.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `fetch`.
        """
        self.poll()
        with self._undisturbed() as now:
            self._begin(list(keys), self._links, now)

    def poll(self) -> None:
        """Takes what the tiers report. Does not wait. Every other call begins with it: it is for
        whoever waits for `fileno`.

        Raises:
            Closed, WrongProcess: as `fetch`.
        """
        self._check()
        self._advance()

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
            SystemFault: a tier does not answer; the keys are forgotten everywhere else.
        """
        self._check()
        asked = list(keys)
        self._forget(asked, self._pool.forget, lambda tier: tier.forget(asked))

    def clear(self) -> None:
        """Nobody finds anything any more, neither in the pool nor in a tier: for new weights. Waits
        for the tiers, as their own `clear`.

        Raises:
            Closed, WrongProcess: as `fetch`.
            SystemFault: a tier does not answer; all others are empty.
        """
        self._check()
        self._forget(None, lambda _: self._pool.clear(), lambda tier: tier.clear())

    def statistics(self) -> ChainStatistics:
        """Counts since it was made, and how it is now.

        Raises:
            Closed, WrongProcess: as `fetch`.
        """
        self._check()
        with self._undisturbed() as now:
            return ChainStatistics(
                hits=self._counts["hits"],
                loaded=sum(link.counts["loaded"] for link in self._links),
                recalled=self._counts["recalled"],
                dropped=self._counts["dropped"],
                declined=self._counts["declined"],
                spare=self._spare - len(self._aside),
                storing=len(self._aside),
                loading=len(self._loading),
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

    def close(self, timeout: float | None = None) -> None:
        """Waits until nothing is under way. The pool is as any other from then on, and the rows are
        the caller's. Closing it again does nothing.

        Args:
            timeout: in seconds; None: until the tiers have answered, or missed their own deadlines.

        Raises:
            TimedOut: something is still under way; the rows must stay. Nothing is stored or loaded
                any more; close it again.
            InvalidType, InvalidArgument: `timeout` is no number.
        """
        deadline = Deadline(timeout)
        if self._is_closed or os.getpid() != self._pid:
            return
        with self._lock:
            self._is_closing = True
            self._pool._keeper = None
            self._pool._own().set_aside(0)
        if not self._wait(
            lambda _: not any(link.jobs or link.unknown for link in self._links), deadline
        ):
            raise TimedOut("a tier chain has blocks under way; its rows must not be freed", timeout)
        with self._lock:
            if self._is_closed:
                return
            native = self._pool._own()
            native.reuse(native.aside())
            native.set_aside(0)
            self._is_closed = True
            self._memory = self._memory[:0, :0].copy()
            self._ready.close()

    def _is_loaded(self, keys: list[bytes], now: float) -> bool:
        """Or there is nobody who could say so."""
        if self._loading.isdisjoint(keys):
            return True
        return all(link.deafness.lasts(now) for link in self._links if link.jobs)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcess("this chain belongs to the process that made it")
        if self._is_closing:
            raise Closed("this chain is closed")

    # Waiting ---------------------------------------------------------------------------------

    @contextmanager
    def _undisturbed(self) -> Iterator[float]:
        """The chain's state is one call's, and no report is taken, not even by a signal's handler.
        Gives the time."""
        with self._lock:
            was_busy, self._is_busy = self._is_busy, True
            try:
                yield time.monotonic()
            finally:
                self._is_busy = was_busy

    def _wait(self, is_done: Callable[[float], bool], deadline: Deadline) -> bool:
        """Takes reports until that is so, or the deadline."""
        bell: Bell | None = None
        try:
            while True:
                self._advance()
                now = time.monotonic()
                if is_done(now):
                    return True
                if deadline.end <= now:
                    return False
                if bell is None:
                    bell = Bell()
                    self._waiting.append(bell)
                    continue  # for what another thread took before there was a bell
                ready = select.poll()
                ready.register(bell.descriptor, select.POLLIN)
                most = min(_MOST_WAIT, deadline.end - now)
                for link in self._links:
                    if link.deafness.lasts(now):
                        most = min(most, link.deafness.until - now)
                        continue
                    with suppress(MemlaneError):  # it is closed: the next turn ends its jobs
                        ready.register(link.tier.fileno(), select.POLLIN)
                ready.poll(1000 * most)
                bell.quiet()
        finally:
            if bell is not None:
                self._waiting.remove(bell)

    def _advance(self) -> None:
        """Takes the reports of all tiers, unless another call is at it."""
        with self._lock:
            if self._is_busy:
                return
            with self._undisturbed() as now:
                has_any = sum(self._take_reports(link, now) for link in self._links)
                self._adopt()
        if has_any:
            for bell in [*self._waiting]:
                bell.ring()

    def _take_reports(self, link: _Link, now: float) -> bool:
        link.listen(now)
        has_any = False
        while (report := link.next_report()) is not None:
            has_any = True
            job, done = report
            if isinstance(job, _Store):
                self._end_store(link, job, done, now)
            else:
                self._end_load(link, job, done, now)
        return has_any

    # Storing ---------------------------------------------------------------------------------

    def _reserve(self, keys: list[bytes]) -> Reservation:
        """The pool's."""
        native = self._pool._own()
        self._advance()
        with self._undisturbed() as now:
            blocks, evicted, aside = native.reserve(keys)
            made = Reservation(self._pool, keys, np.frombuffer(blocks, np.int32), evicted)
            if evicted:
                self._put_aside(evicted, np.frombuffer(aside, np.int32).tolist(), now)
        return made

    def _put_aside(self, keys: list[bytes], rows: list[int], now: float) -> None:
        """What was evicted, and where its bytes are; -1: nowhere any more."""
        evicted = [(key, row) for key, row in zip(keys, rows, strict=True) if row >= 0]
        wanted = evicted
        dropped = [key for key, row in zip(keys, rows, strict=True) if row < 0]
        for link in self._links:
            known = link.has(dropped, "store", now)
            dropped = [key for key, has in zip(dropped, known, strict=True) if has is not True]
        self._counts["dropped"] += len(dropped)
        if self._admission is not None:
            wanted = [each for each in evicted if self._admission.admits(each[0])]
            self._counts["declined"] += len(evicted) - len(wanted)
        for link in self._links:
            if link.is_read_only:
                continue
            room = self._spare
            if link.storing and len(self._links) > 1:  # it must leave some to the others
                room = max(0, self._spare // 2 - link.storing)
            link.counts["skipped"] += max(0, len(wanted) - room)
            self._store(link, wanted[-room:] if room else [], now)
        self._reuse([row for _, row in evicted if not self._aside[row]])

    def _store(self, link: _Link, evicted: list[tuple[bytes, int]], now: float) -> None:
        known = link.has([key for key, _ in evicted], "store", now)
        wanted = [each for each, has in zip(evicted, known, strict=True) if has is not True]
        if not wanted or link.outages["store"].lasts(now):
            return
        rows = [row for _, row in wanted]
        self._aside.update(rows)
        if link.begin("store", _Store(rows, now), [key for key, _ in wanted], rows, now):
            link.storing += len(rows)
            self._leaving.update(wanted)
        else:
            self._aside.subtract(rows)

    def _end_store(self, link: _Link, job: _Store, done: Done, now: float) -> None:
        link.storing -= len(job.rows)
        self._aside.subtract(job.rows)
        link.counts["stored"] += int(done.ok.sum())
        link.counts["failed"] += int((~done.ok).sum())
        link.counts["bytes_stored"] += done.bytes
        link.judge("store", job.begun, done, now)
        self._reuse([row for row in job.rows if not self._aside[row]])

    def _reuse(self, rows: list[int]) -> None:
        """Nobody stores them any more."""
        if not rows:
            return
        free = {*rows}
        for row in free:
            del self._aside[row]
        self._leaving = {key: row for key, row in self._leaving.items() if row not in free}
        native = self._pool._own()
        native.reuse(np.array(rows, np.int32).tobytes())
        if self._is_closing:
            native.set_aside(0)

    def _adopt(self) -> None:
        """Blocks that are aside because of a call that an exception has ended are spare again."""
        aside = self._pool._own().aside()
        if len(aside) // 4 > len(self._aside):
            self._reuse(
                [row for row in np.frombuffer(aside, np.int32).tolist() if not self._aside[row]]
            )

    # Loading ---------------------------------------------------------------------------------

    def _begin(self, keys: list[bytes], links: list[_Link], now: float) -> list[bytes]:
        """Begins to load what is missing of the leading run of keys that are in the pool, on their
        way to it, or perhaps in one of these tiers. Returns that run."""
        if self._is_closing:
            return []
        stored = {key for key, is_there in zip(keys, self._pool.has(keys), strict=True) if is_there}
        missing = [key for key in keys if key not in stored and key not in self._loading]
        room = max(1, self._blocks // 2 - len(self._loading))
        sources = self._sources(missing[:room], links, now)
        run = [
            *takewhile(lambda key: key in stored or key in self._loading or key in sources, keys)
        ]
        wanted: dict[_Link | None, list[bytes]] = {}
        for key in run:
            if key in sources:
                wanted.setdefault(sources[key], []).append(key)
        with ExitStack() as held:  # else what is evicted now could be stored in their place
            for link, of_link in wanted.items():
                if link is not None:
                    link.hold(of_link, held, now)
            self._recall(wanted.pop(None, []))
            for link, of_link in wanted.items():
                if link is not None:
                    for at in range(0, len(of_link), _AT_A_TIME):
                        self._load(link, of_link[at : at + _AT_A_TIME], now)
        return run

    def _sources(
        self, keys: list[bytes], links: list[_Link], now: float
    ) -> dict[bytes, _Link | None]:
        """The first tier that has a key, or else may have it; None if the block is still aside."""
        sources: dict[bytes, _Link | None] = {key: None for key in keys if key in self._leaving}
        perhaps: dict[bytes, _Link | None] = {}
        for link in links:
            left = [key for key in keys if key not in sources]
            for key, is_there in zip(left, link.has(left, "load", now), strict=True):
                if is_there:
                    sources[key] = link
                elif is_there is None:
                    perhaps.setdefault(key, link)
        return {**perhaps, **sources}

    def _recall(self, keys: list[bytes]) -> None:
        """Copies blocks back that are aside."""
        if not keys:
            return
        with self._reserve(keys) as made:
            for key, block in zip(made.keys, made.ids.tolist(), strict=True):
                self._memory[block] = self._memory[self._leaving[key]]
            made.commit()
            self._counts["recalled"] += len(made.keys)

    def _load(self, link: _Link, keys: list[bytes], now: float) -> None:
        made = self._reserve(keys)
        if not made.keys:  # the policy declines them, or all blocks are pinned
            return
        self._loading.update(made.keys)
        if not link.begin("load", _Load(made, now), made.keys, made.ids, now):
            self._loading.difference_update(made.keys)
            made.commit(np.zeros(len(made.keys), np.bool_))

    def _end_load(self, link: _Link, job: _Load, done: Done, now: float) -> None:
        keys = job.reservation.keys
        self._loading.difference_update(keys)
        ok = done.ok & [key not in job.revoked for key in keys]
        link.counts["loaded"] += int(ok.sum())
        link.counts["missed"] += int((~done.ok).sum())
        link.counts["bytes_loaded"] += done.bytes
        link.judge("load", job.begun, done, now)
        job.reservation.commit(ok)
        left = [key for key, has in zip(keys, done.ok, strict=True) if not has]
        if elsewhere := [key for key in left if key not in job.revoked]:
            self._begin(elsewhere, self._links[link.place + 1 :], now)

    # Forgetting ------------------------------------------------------------------------------

    def _forget(
        self,
        keys: list[bytes] | None,
        of_pool: Callable[[list[bytes]], None],
        of_tier: Callable[[Tier], None],
    ) -> None:
        """None: all keys."""
        failed: MemlaneError | None = None
        self._revoke(keys, of_pool)
        for link in self._links:
            try:
                of_tier(link.tier)
            except MemlaneError as error:
                failed = failed or error
        self._revoke(keys, of_pool)  # what another thread has loaded meanwhile
        if failed is not None:
            raise failed

    def _revoke(self, keys: list[bytes] | None, of_pool: Callable[[list[bytes]], None]) -> None:
        """In the pool, and on the way to it."""
        with self._undisturbed():
            of_pool(keys or [])
            for key in [*self._leaving] if keys is None else keys:
                self._leaving.pop(key, None)
            for link in self._links:
                for job in [*link.jobs.values(), *link.unknown]:
                    if isinstance(job, _Load):
                        job.revoked.update(job.reservation.keys if keys is None else keys)
