"""A tier on a local disk: bounded, checked, with deadlines, and there again after a restart."""

from __future__ import annotations

import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from memlane import _native
from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline, seconds_of
from memlane._base.diagnosis import warn
from memlane.errors import (
    Closed,
    InvalidArgument,
    InvalidType,
    TimedOut,
    WrongProcess,
    system_fault,
)
from memlane.tiers.pool import Policy, PolicyName, checked_policy, show
from memlane.tiers.tier import CHANGED, Done, Namespace, Rows, Ticket

_MOST_SLOTS = (1 << 31) - 1
_MOST_ROW_BYTES = 1 << 30  # one call of the system moves just less than 2 GiB
_PAGE = 4096
_THREADS = 8
_QUIET = 60.0  # seconds
_MAY_RING = True  # whether io_uring is tried; tests do without
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}

# Of kinds of faults, as native/tiers/block_jobs.hpp numbers them; a miss is none.
_WHY = (
    *(None, None, CHANGED, None),
    *("the deadline has passed", "the disk does not answer"),
)
_TROUBLE = (
    "a disk tier does not answer: nothing is stored or loaded until it does",
    "a disk tier cannot store: its disk is full",
    "a disk tier has found blocks that are not what was stored; they are misses",
)


Engine = Literal["io_uring", "threads"]


@dataclass(frozen=True)
class Latency:
    """Of blocks from the call on, in seconds, within 13 %; 0 if there was none."""

    p50: float
    p99: float


@dataclass(frozen=True)
class DiskStatistics:
    """Of a disk tier since it was opened, and now.

    Attributes:
        capacity, used: bytes of slots, now.
        slots: how many blocks fit.
        blocks: in slots now: stored, being stored, or forgotten and still held.
        recovered: blocks that an earlier life had left.
        stored, loaded: blocks.
        missed: loads of keys that were not there.
        declined: blocks that the policy did not want, or for which every slot was held.
        evicted: blocks that made room for others.
        errors: reads and writes that the system refused.
        corrupt: loads whose bytes were not those that were stored.
        expired: blocks that missed their deadline.
        queue: blocks that wait for a thread, now.
        store_latency, load_latency: of blocks.
        stalled: whether the disk has been silent since a deadline.
        engine: as `DiskTier.engine`.
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


class DiskTier:
    """Blocks in a pair of files, one slot each, that are never more than their capacity::

        with DiskTier("/nvme/kv", region.rows, "200GiB", namespace="llama-3-8b") as tier:
            ticket = tier.store(keys, ids)
            for done in tier.poll():
                ...

    Each block has a CRC-32C seeded with its key: bytes that are not those that were stored, for
    whatever reason, are a miss. Nothing is ever flushed: a power cut costs blocks, not their
    correctness; the end of the process costs only the blocks under way. The files encode what
    prompts were about; they are readable by their user only, and encrypted only by the file system.

    One process has the files at a time. Its threads take turns, but with a policy of your own a
    call beside another is refused (`ConcurrentUse`). Timeouts are in seconds. A block costs two
    system calls each way, on a thread of the tier's; a slot 85 bytes of memory, with the policy
    `tuned` up to 260. With `engine` "io_uring" 32 blocks are under way at a time, through up to
    64 MiB of memory of the tier's, or that of two rows if they are larger.
    """

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
    ) -> None:
        """Args:
            path: a folder; it is made if it is missing.
            rows: a writable, contiguous buffer of shape (blocks, bytes), which must not be freed
                before the tier is closed.
            capacity: bytes on disk, as a number or as text with KiB, MiB, GiB or TiB. Where the
                disk has less, that is the capacity, with a warning.
            namespace: what the same key may mean different blocks under: model, revision, dtype,
                layout, tenant. Blocks of other namespaces are not found, and overwritten first.
            policy: as of `BlockPool`. An object sees digests of 24 bytes.
            timeout: of `store`, `load`, `drain` and `close`, in seconds, unless they are given one.
            direct: whether to go past the page cache (O_DIRECT). None: if rows are a multiple of
                4096 bytes and the file system can.
            opener: names the pair of files in the folder; each tier at a time needs its own.

        Raises:
            InvalidType, InvalidArgument: an argument is none, or the capacity is below one row.
            TierInUse: the files are another tier's.
            SegmentRefused: there are other files of that name, or another user's.
            LayoutMismatch: they are of another format version.
            Unsupported: `direct` is True, and the file system cannot.
            OutOfMemory: the disk has no space for a row.
            SystemFault: the system refuses something.
        """
        held = Rows(rows)
        if held.nbytes > _MOST_ROW_BYTES:
            raise InvalidArgument(f"a row must have at most 1 GiB, not {held.nbytes} bytes")
        nbytes = capacity_in_bytes(capacity)
        slots = min(_MOST_SLOTS, _native.slots_in(nbytes, held.nbytes))
        if slots < 1:
            raise InvalidArgument(f"capacity must hold a row of {held.nbytes} bytes, not {nbytes}")
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", _text("opener", opener)):
            raise InvalidArgument(
                f"opener must be 1 to 64 letters, digits, _, - or ., not {opener!r}"
            )
        self._namespace = Namespace(namespace)
        checked_policy(policy)
        if direct not in (None, True, False):
            raise InvalidType(f"direct must be True, False or None, not {direct!r}")
        if not isinstance(path, (str, os.PathLike)):
            raise InvalidType(f"path must be a path, not {type(path).__name__}")
        folder = os.fsdecode(path)
        if "\0" in folder or folder.encode(errors="replace").decode() != folder:
            raise InvalidArgument(f"path must be UTF-8, without a zero byte, not {folder!r}")
        self._timeout = seconds_of(timeout)
        self._rows = held
        if direct is None and held.nbytes % _PAGE:
            direct = False
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)
        except OSError as error:
            raise system_fault(error.errno or 0, f"cannot make the folder {folder}") from None
        self._native = _native.DiskTier(
            *(folder, opener, rows, held.count, held.nbytes, slots, self._namespace.id),
            *(direct, _THREADS, _MAY_RING, policy),
        )
        self._facts = self._native.facts()
        show(self._native)
        self._batches: dict[int, bool] = {}  # of reports: whether a caller has them
        self._trouble = [(0, 0.0)] * len(_TROUBLE)  # how often, and until when it is not said again
        self._warn_of(folder, self._facts)

    def _warn_of(self, folder: str, facts: dict[str, Any]) -> None:
        size = facts["slot_bytes"]
        if facts["slots"] < facts["wanted_slots"]:
            has, wanted = facts["slots"] * size, facts["wanted_slots"] * size
            warn("the disk of %s has space for %d bytes of blocks, not for %d", folder, has, wanted)
        if facts["is_memory"]:
            warn("%s is in memory (tmpfs): what the tier stores there is no disk's", folder)
        if facts["refused"]:
            why = os.strerror(facts["refused"])
            warn("the space of the tier in %s is not reserved: %s; stores may fail", folder, why)
        if facts["was_damaged"]:
            warn("the first page of the tier in %s is damaged; it begins empty", folder)
        if facts["other_row_bytes"]:
            was = facts["other_row_bytes"]
            warn(
                "the tier in %s had rows of %d bytes, not %d; it begins empty",
                folder,
                was,
                self._rows.nbytes,
            )

    # Keys ------------------------------------------------------------------------------------

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Whether each can be loaded now. None of them, while the disk does not answer.

        Raises:
            InvalidType, InvalidArgument: a key is not 1 to 255 bytes, or comes twice.
            Closed, WrongProcess: it is closed, or this is a forked child.
        """
        return [*self._native.has(self._namespace.digests(keys))]

    def hold(self, keys: Sequence[bytes]) -> Hold:
        """What is there is not evicted until the returned object is released.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `has`.
        """
        return Hold(*self._native.hold(self._namespace.digests(keys)))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts as a use of every key, the last first.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `has`.
        """
        self._native.touch(self._namespace.digests(keys))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody finds these keys any more, also after a restart; what is being stored under them
        will not be there either. But nothing is flushed: after a power cut they may be back, and
        after a kill those that the system was writing at that moment.

        Raises:
            InvalidType, InvalidArgument, Closed, WrongProcess: as `has`.
            SystemFault: the disk refuses it; they are not found until a restart.
        """
        if error := self._native.forget(self._namespace.digests(keys)):
            raise system_fault(error, "cannot erase a block of a tier")

    def clear(self) -> None:
        """Nobody finds anything any more, of no namespace, also after a restart. Loads under way
        may miss; what is being stored will not be there. After a power cut it may all be back.

        Raises:
            Closed, WrongProcess: as `has`.
            SystemFault: the disk refuses it; nothing is found until a restart.
        """
        self._native.clear()

    # Blocks ----------------------------------------------------------------------------------

    def store(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to store rows. A key that is there already is not stored again, and one that an
        earlier call is storing is reported as that call's.

        Args:
            keys: what to find them by.
            ids: rows, in the same order.
            timeout: seconds until blocks that are not stored yet are reported as failed.

        Raises:
            InvalidType, InvalidArgument: a key or a row is none, or comes twice; nothing is stored.
            Closed, WrongProcess: as `has`.
        """
        return self._begin(self._native.store, keys, ids, timeout)

    def load(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to load blocks into rows. A key whose block cannot be read, or is not what was
        stored, is not found any more.

        Args:
            keys: what they were stored under.
            ids: rows, in the same order. What a row has is undefined unless its block is ok.
            timeout: seconds until blocks that are not loaded yet are reported as missing.

        Raises:
            InvalidType, InvalidArgument: a key or a row is none, or comes twice; nothing is loaded.
            Closed, WrongProcess: as `has`.
        """
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
        """What is done since the last call, in any order. Does not wait.

        Raises:
            Closed, WrongProcess: as `has`.
        """
        known = dict(self._batches)
        batch = self._native.begin_poll(
            [each for each, has_arrived in known.items() if has_arrived],
            [each for each, has_arrived in known.items() if not has_arrived],
        )
        for each in known:
            self._batches.pop(each, None)
        try:
            done = [
                Done(
                    Ticket(number), np.frombuffer(ok, np.bool_), _why(kind, error), nbytes, seconds
                )
                for number, ok, kind, error, nbytes, seconds in self._native.poll(batch)
            ]
            self._warn_of_trouble()
            # A signal's handler runs, and may raise, after a call only: from here on there is none.
            self._batches[batch] = True
            return done
        except BaseException:
            self._batches[batch] = False  # first: the next poll puts them back, if this does not
            with suppress(Closed):
                self._native.put_back(batch)
            raise

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to report, for select, epoll and
        asyncio. It is the tier's: never read or close it.

        Raises:
            Closed, WrongProcess: as `has`.
        """
        return self._native.fileno()

    # Facts -----------------------------------------------------------------------------------

    def _warn_of_trouble(self) -> None:
        """A line when it begins, or begins again after a minute without."""
        now = time.monotonic()
        for at, (text, count) in enumerate(zip(_TROUBLE, self._native.alerts(), strict=True)):
            known, until = self._trouble[at]
            if count == known:
                continue
            self._trouble[at] = (count, now + _QUIET)  # first, because a handler may raise
            if now >= until:
                warn(text)

    @property
    def used(self) -> int:
        """Bytes of the slots that have a block.

        Raises:
            Closed, WrongProcess: as `has`.
        """
        blocks: int = self._native.statistics()["blocks"]
        size: int = self._facts["slot_bytes"]
        return blocks * size

    @property
    def is_direct(self) -> bool:
        """Whether it goes past the page cache."""
        return bool(self._facts["is_direct"])

    @property
    def engine(self) -> Engine:
        """What reads and writes: "io_uring", on one thread, past the page cache where the system
        allows it; else "threads", which use pread and pwrite.
        """
        engine: Engine = self._facts["engine"]
        return engine

    def statistics(self) -> DiskStatistics:
        """Counts since it was opened, and how it is now.

        Raises:
            Closed, WrongProcess: as `has`.
        """
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
        )

    # Life ------------------------------------------------------------------------------------

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is under way, not even what was reported as failed.

        Args:
            timeout: in seconds; None: the tier's own.

        Returns:
            False if something was still under way then. `fileno` says only afterwards that there
            is something to report.

        Raises:
            InvalidType, InvalidArgument: `timeout` is no number.
            Closed, WrongProcess: as `has`.
        """
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
        """Waits until nothing is under way, and closes: the rows are the caller's again. What was
        not polled is lost. Closing it again does nothing.

        Args:
            timeout: as of `drain`.

        Raises:
            TimedOut: something is still under way, and the tier is still open: its rows must stay
                until the disk answers.
            InvalidType, InvalidArgument: as `drain`.
        """
        deadline = Deadline(self._timeout if timeout is None else timeout)
        with contextlib.suppress(Closed, WrongProcess):
            while self.drain(deadline.left()):
                if self._native.close():
                    return
            raise TimedOut("a disk tier has work under way; its rows must not be freed", timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_native"):
            with contextlib.suppress(TimedOut):  # then native code keeps the rows for ever
                self.close()


class Hold:
    """Blocks that are not evicted for now. A context manager; leaving it releases them, as does
    dropping the last reference.

    Attributes:
        there: a bool for each key: whether the tier has it.
    """

    there: list[bool]

    def __init__(self, native: _native.DiskHold, there: list[bool]) -> None:
        self._native = native  # releases them, at the latest when it is dropped
        self.there = there

    def release(self) -> None:
        """Ends it. Never raises; calling it again does nothing."""
        self._native.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def capacity_in_bytes(capacity: int | str) -> int:
    """A number of bytes, or text as "200GiB".

    Raises:
        InvalidType, InvalidArgument: it is none.
    """
    if not isinstance(capacity, str):
        return integer_from("capacity", capacity, 1, 1 << 62)
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]iB|)\s*", capacity)
    if found is None:
        raise InvalidArgument(
            f"capacity must be bytes, or text as 500MiB, 200GiB or 2TiB, not {capacity!r}"
        )
    return integer_from("capacity", int(float(found[1]) * _UNITS[found[2]]), 1, 1 << 62)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidType(f"{name} must be a string, not {type(value).__name__}")
    return value


def _why(kind: int, error: int) -> str | None:
    return os.strerror(error) if error else _WHY[kind]
