"""Moves blocks between a chain's pool and its tiers: evicted blocks that are stored, missing ones
that are looked for and loaded, and whose rows are whose meanwhile.

All of it is called with the chain's lock held, and waits for nothing. An evicted block is not
copied. The pool has spare blocks: it hands one of them to the new key, and the evicted block stays
aside, with its bytes, until the tiers have reported it; then it is spare.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import takewhile
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from memlane._base.diagnosis import warn
from memlane.errors import InvalidArgument
from memlane.tiers.linked import Flags, Flush, Job, Jobs, Link
from memlane.tiers.pool import Backing, BlockPool, Reservation
from memlane.tiers.tier import Done
from memlane.tiers.waiting import LONGEST_PAUSE

AT_A_TIME = 64
"""Blocks of a load; what it has loaded is found when all of them are reported."""
_REMEMBERED = 4  # times the pool: keys of which `second` knows that they were evicted once


@dataclass(eq=False)
class Search:
    """Keys of which some tier does not know yet whether it has them. Nothing is reserved for them
    until it does."""

    keys: list[bytes]
    unknown: set[bytes]
    due: float  # from then on they count as missing


class Ban:
    """Keys that are neither stored nor loaded, because they are being forgotten; None: all."""

    def __init__(self, keys: set[bytes] | None) -> None:
        self.keys = keys


class SecondTime:
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


class Moves:
    """The transfers under way between a pool and its tiers.

    Attributes:
        links: the tiers, the fastest first.
        jobs: what they were asked for.
        backing: the pool's inner side.
        counts: blocks, by what became of them.
        searches: keys that are looked for.
        bans: keys that are being forgotten; of calls under way, whose frames keep them: an
            exception leaves none behind.
        is_closing: nothing is begun any more.
    """

    def __init__(
        self,
        links: list[Link],
        pool: BlockPool,
        backing: Backing,
        memory: npt.NDArray[np.uint8],
        *,
        spare: int,
        declines_first: bool,
        timeout: float,
    ) -> None:
        self.links, self.backing = links, backing
        self.jobs = Jobs(links)
        self.counts: Counter[str] = Counter()
        self.searches: list[Search] = []
        self.bans: WeakSet[Ban] = WeakSet()
        self.is_closing = False
        self._pool, self._memory = pool, memory
        self._blocks = pool.statistics().blocks
        self._spare = spare
        self._admission = SecondTime(_REMEMBERED * self._blocks) if declines_first else None
        self._timeout = timeout
        self._unsaid = 0  # dropped blocks that no line of the log has counted
        self._silent_until = 0.0

    def release_memory(self) -> None:
        """Lets go of the rows."""
        self._memory = self._memory[:0, :0].copy()

    def spare(self) -> int:
        """Returns how many blocks what is evicted next can stay in."""
        return self._spare - len(self.jobs.kept_rows())

    def at_work(self) -> list[Link]:
        if self.searches:
            return self.links
        return [link for link in self.links if link.all_jobs]

    def is_loaded(self, keys: list[bytes]) -> bool:
        """Returns whether no answer about these keys, and no report of a load, is still
        expected."""
        now = time.monotonic()
        wanted = set(keys)
        if not all(wanted.isdisjoint(search.unknown) for search in self.searches):
            return False
        return all(
            job.kind == "store" or wanted.isdisjoint(job.keys)
            for link in self.links
            if not link.poll_outage.lasts(now)
            for job in link.all_jobs
        )

    def reclaim(self) -> None:
        """Returns rows whose stores have ended to the spare ones."""
        unused = self.backing.aside() - self.jobs.kept_rows()
        if unused:
            self.backing.reuse(unused)
        if self.is_closing:
            self.backing.give_up()

    # Reports ------------------------------------------------------------------------------------

    def take_reports(self, link: Link, now: float) -> bool:
        """Takes what the tier has reported, and ends jobs whose report will not come. Returns
        whether there was any."""
        has_any = False
        link.collect(now)
        for done in link.reports.each():
            has_any = True
            self._take(link, done, now)
        for job in link.overdue():
            has_any = True
            link.fail(job.kind, "it has not reported at its deadline", now)
            job.fail()
            self._end(link, job, np.zeros(len(job.keys), np.bool_), now)
            link.remove(job)
        return has_any

    def _take(self, link: Link, done: Done, now: float) -> None:
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
                job.fail()
            self._end(link, job, ok, now)
        link.jobs.pop(done.ticket, None)  # last: until then it may be taken again

    def _end(self, link: Link, job: Job, ok: Flags, now: float) -> None:
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
            self.load_run(missing, self.links[link.place + 1 :], now)

    def _is_forgotten(self, job: Job, key: bytes) -> bool:
        return key in job.revoked or self.is_banned(key)

    def is_banned(self, key: bytes) -> bool:
        return any(ban.keys is None or key in ban.keys for ban in self.bans)

    # Storing -----------------------------------------------------------------------------------

    def revoke_loads(self, keys: set[bytes]) -> None:
        """A caller that computes a block does not wait for a load of it, which then is dropped."""
        for job in self.jobs.of("load"):
            revoked = [key for key in job.keys if key in keys and key not in job.revoked]
            if revoked:
                job.revoked.update(revoked)
                self._pool.forget(revoked)

    def reserve(self, keys: list[bytes], now: float | None) -> Reservation:
        made, evicted = self.backing.reserve(keys)
        if evicted and now is not None:
            self._store_evicted(evicted, now)
        return made

    def _store_evicted(self, evicted: list[tuple[bytes, int]], now: float) -> None:
        """Stores blocks that were evicted, from the rows that keep their bytes; -1: none does."""
        kept = [each for each in evicted if each[1] >= 0]
        dropped = [key for key, row in evicted if row < 0]
        for link in self.links if dropped else ():
            known = link.has(dropped, "store", now)
            dropped = [key for key, has in zip(dropped, known, strict=True) if has is not True]
        if dropped:
            self._drop(len(dropped), now)
        wanted = [each for each in kept if not self.is_banned(each[0])]
        if self._admission is not None:
            wanted = [each for each in wanted if self._admission.admits(each[0])]
            self.counts["declined"] += len(kept) - len(wanted)
        for link in self.links:
            if link.is_read_only:
                continue
            busy = link.storing() if len(self.links) > 1 else 0
            # One that is slow must leave some to the others.
            room = max(0, self._spare // 2 - busy) if busy else self._spare
            link.counts["skipped"] += max(0, len(wanted) - room)
            self.store(link, wanted[-room:] if room else [], now)
        # Rows that no tier has taken are spare again with the next call.

    def _drop(self, blocks: int, now: float) -> None:
        self.counts["dropped"] += blocks
        self.backing.count_dropped(blocks)
        self._unsaid += blocks
        if now >= self._silent_until:
            unsaid, self._unsaid, self._silent_until = self._unsaid, 0, now + LONGEST_PAUSE
            warn(
                "a tier chain lost %d evicted blocks: others that are being stored had taken its "
                "%d spare blocks; give it a larger spare, or reserve in smaller steps",
                *(unsaid, self._spare),
            )

    def store(
        self,
        link: Link,
        blocks: list[tuple[bytes, int]],
        now: float,
        flush: Flush | None = None,
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
        return link.begin(Job("store", keys, rows, flush=flush, pinned=pinned))

    # Loading -----------------------------------------------------------------------------------

    def load_run(self, keys: list[bytes], links: list[Link], now: float) -> list[bytes]:
        """Begins to load what is missing of the leading run of keys that are in the pool, on their
        way to it, or perhaps in one of these tiers. Returns that run, or
        nothing while the chain is being closed."""
        if self.is_closing:
            return []
        loading = self.jobs.loading()
        stored = {key for key, is_there in zip(keys, self._pool.has(keys), strict=True) if is_there}
        coming = loading | stored
        missing = [*dict.fromkeys(key for key in keys if key not in coming)]
        room = max(0, max(1, self._blocks // 2) - len(loading))
        sources, unknown = self._sources(missing[:room], links, now)
        run = [*takewhile(lambda key: key in coming or key in sources or key in unknown, keys)]
        behind = sources.keys() - {*run}  # there, and computed again because others are not
        for each in links:
            each.seek([key for key in missing if key in behind and sources[key] is each], now)
        unknown.intersection_update(run)
        if unknown:
            search = next((each for each in self.searches if each.keys == keys), None)
            if search is None:
                self.searches.append(Search(keys, unknown, now + self._timeout))
            else:
                search.unknown = unknown
        wanted: dict[Link | None, list[bytes]] = {}
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
                    for at in range(0, len(of_link), AT_A_TIME):
                        self._load(link, of_link[at : at + AT_A_TIME], now)
        return run

    def go_on(self, now: float) -> bool:
        """Looks again for what tiers did not know, and how many are left out. Returns whether a
        search has ended."""
        self.backing.set_left_out(sum(link.is_left_out(now) for link in self.links))
        searches, self.searches = self.searches, []
        for search in searches:
            if search.due > now and not self.is_closing:
                self.load_run(search.keys, self.links, now)
                for again in self.searches:
                    if again.keys == search.keys:
                        again.due = min(again.due, search.due)
        return len(self.searches) < len(searches)

    def _sources(
        self, keys: list[bytes], links: list[Link], now: float
    ) -> tuple[dict[bytes, Link | None], set[bytes]]:
        """Returns the first tier that has each key, or None if its block is still aside; and the
        keys that no tier has, but of which one does not know yet."""
        keys = [key for key in keys if not self.is_banned(key)]
        aside = self.jobs.aside() if keys else {}
        sources: dict[bytes, Link | None] = {key: None for key in keys if key in aside}
        unknown: set[bytes] = set()
        for link in links:
            left = [key for key in keys if key not in sources]
            absent = []
            for key, is_there in zip(left, link.has(left, "load", now), strict=True):
                if is_there:
                    sources[key] = link
                elif is_there is None:
                    unknown.add(key)
                else:
                    absent.append(key)
            link.seek(absent, now)
        return sources, unknown - sources.keys()

    def _recall(self, keys: list[bytes], now: float) -> None:
        """Copies blocks back that are aside."""
        if not keys:
            return
        aside = self.jobs.aside()
        with self.reserve(keys, now) as made:
            for key, block in made:
                self._memory[block] = self._memory[aside[key]]
            made.commit()
            self.counts["recalled"] += len(made)

    def _load(self, link: Link, keys: list[bytes], now: float) -> None:
        made = self.reserve(keys, now)
        if not len(made):  # the policy declines them, or all blocks are pinned
            return
        reserved = dict(iter(made))
        job = Job("load", [*reserved], [*reserved.values()], reservation=made)
        if not link.begin(job):
            keys, job.keys = job.keys, []  # of which it may still write to the rows
            self._pool.forget(keys)
            self.load_run(keys, self.links[link.place + 1 :], now)
