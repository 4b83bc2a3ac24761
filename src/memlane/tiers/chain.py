"""A pool and the tiers behind it: what is evicted is stored, and what is missing is loaded.

The chain has no thread. Tiers work by themselves; the chain takes their reports in its own calls
and in the pool's `reserve`, and all that follows from them happens there, under one lock. What is
under way is in `moves.py`, what one tier was asked for in `linked.py`, the lock and the only waits
are in `progress.py`; here are the calls.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from math import inf
from operator import itemgetter
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np

from memlane._base.arguments import integer_from, items_of
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.diagnosis import warn
from memlane.errors import (
    Closed,
    ConcurrentUse,
    InvalidArgument,
    InvalidType,
    TimedOut,
    Unsupported,
    WrongProcess,
)
from memlane.tiers.linked import Flush, Link, TierUse
from memlane.tiers.moves import AT_A_TIME, Ban, Moves
from memlane.tiers.pool import Backing, BlockPool, Pin, Reservation
from memlane.tiers.progress import Progress
from memlane.tiers.tier import Namespace, Rows, Tier, has_epochs

Admission = Literal["all", "second"]


@dataclass(frozen=True)
class ChainStatistics:
    """Counters of a chain since it was made, and its state now.

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
        if seconds == inf:
            raise InvalidArgument("timeout of a chain must be a number of seconds, not None")
        blocks = pool.statistics().blocks
        links = [
            Link(tier, place, seconds, most_sought=blocks)
            for place, tier in enumerate(items_of("tiers", tiers))
        ]
        for link in links:
            if not isinstance(link.tier, Tier):
                raise InvalidType(f"tiers must be Tiers, not {link.name}")
        if not links:
            raise InvalidArgument("tiers must have a tier")
        if len({id(link.tier) for link in links}) != len(links):
            raise InvalidArgument("tiers must not have a tier twice")
        if admission not in get_args(Admission):
            raise InvalidArgument(f"admission must be 'all' or 'second', not {admission!r}")
        held = Rows(rows)
        if held.count < blocks:
            raise InvalidArgument(f"rows must be at least the pool's {blocks}, not {held.count}")
        wanted = max(1, blocks // 8)
        if spare is not None:
            wanted = integer_from("spare", spare, 1, max(1, blocks - 1))
        memory = np.frombuffer(memoryview(rows).cast("B"), np.uint8).reshape(held.count, -1)
        self._pool = pool
        self._pid = os.getpid()
        self._hits = 0
        self._is_closed = False
        self._ready = select.epoll()
        try:
            for link in links:
                self._ready.register(link.tier.fileno(), select.EPOLLIN)
            backing = Backing(pool, wanted)
        except BaseException:
            self._ready.close()
            raise
        self._moves = Moves(
            *(links, pool, backing, memory),
            spare=wanted,
            declines_first=admission == "second",
            timeout=seconds,
        )
        self._progress = Progress(self._moves)
        backing.begin(self._reserve)

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
        self._progress.advance(self._moves.at_work())
        asked = items_of("keys", keys)
        pin = self._pool.pin(asked)
        try:
            self._hits += len(pin.ids)
            has_grown = True
            while has_grown and len(pin.ids) < len(asked):  # half of the pool at a time
                run = self._begin(asked[len(pin.ids) :], self._moves.links)
                if not run:
                    break
                is_in_time = self._progress.wait(partial(self._moves.is_loaded, run), deadline)
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
        self._progress.advance(self._moves.at_work())
        self._begin(items_of("keys", keys), self._moves.links)

    def poll(self) -> None:
        """Takes what the tiers report. Does not wait. Other calls take it, too: this one is for
        those who wait for `fileno`.

        Raises:
            Closed, WrongProcess: as `fetch`.
        """
        self._check()
        self._progress.advance(self._moves.links)

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
        asked = items_of("keys", keys)
        self._pool.has(asked)  # checks them
        asked = [*dict.fromkeys(asked)]
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
        """Does as `clear(epoch=epoch)`, but empties no tier: for the begin, when the tiers have
        blocks of that epoch from before.

        Raises:
            InvalidType, Unsupported, Closed, WrongProcess, ConcurrentUse, SystemFault: as `clear`.
        """
        self._check()
        self._enter(epoch, empties=False)

    def _enter(self, epoch: str | bytes | int, *, empties: bool) -> None:
        Namespace(b"").set_epoch(epoch)  # checks it
        for link in self._moves.links:
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
        with self._progress.lock:
            now = time.monotonic()
            moves = self._moves
            return ChainStatistics(
                hits=self._hits,
                loaded=sum(link.counts["loaded"] for link in moves.links),
                recalled=moves.counts["recalled"],
                dropped=moves.counts["dropped"],
                declined=moves.counts["declined"],
                spare=moves.spare(),
                storing=moves.jobs.storing(),
                loading=len(moves.jobs.loading()),
                tiers=tuple(link.use(now) for link in moves.links),
            )

    def flush(self, timeout: float | None = None) -> bool:
        """Stores the blocks of the pool in every tier that does not have them, whatever
        `admission` is, and waits for it. `close` does the same.

        Args:
            timeout: seconds to wait; None: until the tiers have answered, or missed their
                deadlines.

        Returns:
            False if not all were stored: the time was too short, a tier failed, or another thread
            has closed the chain. A block that a tier declines or evicts counts as stored.

        Raises:
            InvalidType, InvalidArgument: `timeout` is no number.
            Closed, WrongProcess: as `fetch`.
            ConcurrentUse: as `forget`.
        """
        deadline = Deadline(timeout)
        self._check()
        if self._progress.is_interrupted:
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
            TimedOut: something is still under way, or a signal's handler has called it in the
                middle of another call; the rows must stay. Nothing else is stored or loaded any
                more; close it again.
            InvalidType, InvalidArgument: `timeout` is no number.
        """
        deadline = Deadline(timeout)
        if self._is_closed or os.getpid() != self._pid:
            return
        is_interrupted = self._progress.is_interrupted
        stores = store and not self._moves.is_closing and not is_interrupted
        if stores and not self._flush(deadline) and not self._moves.is_closing:
            warn("a tier chain was closed before every block of its pool was stored")
        with self._progress.lock:
            self._moves.is_closing = True
            self._moves.backing.end()
        if is_interrupted:  # what it interrupts may be about to begin a store
            why = "a tier chain is in the middle of another call of this thread; close it again"
            raise TimedOut(why, timeout)
        if not self._progress.wait(
            lambda: not any(link.all_jobs for link in self._moves.links), deadline
        ):
            raise TimedOut("a tier chain has blocks under way; its rows must not be freed", timeout)
        with self._progress.lock:
            if not self._is_closed:
                self._moves.reclaim()
                self._moves.release_memory()
                self._ready.close()
                self._is_closed = True  # last: an interrupted call is done by the next

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close(store=kind is None)

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise WrongProcess("this chain belongs to the process that made it")
        if self._moves.is_closing:
            raise Closed("this chain is closed")

    # Storing and loading ------------------------------------------------------------------------

    def _reserve(self, keys: list[bytes]) -> Reservation:
        """`BlockPool.reserve`, while the pool has this chain."""
        is_interrupted = self._progress.is_interrupted
        self._progress.advance(self._moves.at_work())
        with self._progress.lock:
            may_store = not (is_interrupted or self._moves.is_closing)
            if not is_interrupted:
                self._moves.revoke_loads({*keys})
                for link in self._moves.links:
                    link.computed(keys)
            # What is evicted in the middle of another change is lost, and spare later.
            return self._moves.reserve(keys, time.monotonic() if may_store else None)

    def _flush(self, deadline: Deadline) -> bool:
        flush, first = Flush(), 0
        links = [link for link in self._moves.links if not link.is_read_only]
        if not links:
            return True
        while self._progress.wait(
            lambda: len(self._moves.jobs.of_flush(flush)) < 2 * len(links), deadline
        ):
            with self._progress.lock:
                if self._moves.is_closing:  # by another thread: the rows may be the caller's
                    flush.has_failed = True
                    break
                pinned, blocks, first = self._moves.backing.pin_stored(first, AT_A_TIME)
                if not blocks:
                    break
                now = time.monotonic()
                wanted = [each for each in blocks if not self._moves.is_banned(each[0])]
                for link in links:
                    flush.has_failed |= not self._moves.store(link, wanted, now, flush, pinned)
        is_in_time = self._progress.wait(lambda: not self._moves.jobs.of_flush(flush), deadline)
        return is_in_time and not flush.has_failed and not blocks

    def _begin(self, keys: list[bytes], links: list[Link]) -> list[bytes]:
        """Does as `_load_run`, but nothing in the middle of another change."""
        if self._progress.is_interrupted:
            return []
        with self._progress.lock:
            return self._moves.load_run(keys, links, time.monotonic())

    # Forgetting --------------------------------------------------------------------------------

    def _forget(
        self,
        keys: set[bytes] | None,
        of_pool: Callable[[list[bytes]], None],
        of_tier: Callable[[Tier], None],
    ) -> None:
        """Drops `keys` (None: all); nothing is stored or loaded under them meanwhile."""
        if self._progress.is_interrupted:
            raise ConcurrentUse("this chain is in the middle of another call of this thread")
        failed: Exception | None = None
        ban = Ban(keys)
        try:
            with self._progress.lock:
                self._moves.bans.add(ban)
                of_pool([*(keys or ())])
                for link in self._moves.links:
                    for job in link.all_jobs:
                        job.revoked.update(job.keys if keys is None else keys)
            for link in self._moves.links:
                try:
                    of_tier(link.tier)
                except Exception as error:
                    failed = failed or error
        finally:
            del ban  # the traceback of an exception may keep this frame
        if failed is not None:
            raise failed
