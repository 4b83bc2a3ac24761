"""The interface of every tier, and the arguments that all tiers check in the same way."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NewType, Self

import numpy as np
import numpy.typing as npt

from memlane._base.arguments import integer_from, items_of
from memlane.errors import InvalidArgument, InvalidType, Unsupported

Ticket = NewType("Ticket", int)
DIGEST_BYTES = 24
CHANGED = "a block is not what was stored"
"""A load found other bytes or another key: only this block is bad, not the tier."""

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, eq=False)
class Done:
    """The report of a `store` or a `load`. From its report on, the tier writes to none of the rows;
    it may still read a row whose store was late, to no effect.

    Attributes:
        ticket: what the call returned.
        ok: a bool for each key, in their order: whether the row has the block (load), or the tier
            has it (store).
        error: the first thing that went wrong, or None. A key that is not there, or was declined,
            is no error.
        bytes: how many were moved.
        seconds: from the call to the last of its blocks.
    """

    ticket: Ticket
    ok: npt.NDArray[np.bool_]
    error: str | None
    bytes: int
    seconds: float


class TierPin:
    """Blocks of a tier that are not evicted for now. A context manager; leaving it releases them,
    as does dropping the last reference.

    Attributes:
        there: a bool for each key: whether the tier has it.
    """

    def __init__(self, there: list[bool], release: Callable[[], object] | None = None) -> None:
        """Args:
        there: see above.
        release: releases the blocks. It must not raise, and may be called several times.
        """
        self.there = there
        self._release = release

    def release(self) -> None:
        """Releases the blocks. Never raises; calling it again does nothing."""
        if self._release is not None:
            self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Tier(ABC):
    """Blocks behind a buffer of rows, one block a row.

    Every tier promises: a submitted block is reported exactly once, at its deadline at the latest;
    a load that fails, or finds other bytes than were stored, is a miss of that key alone; a key
    that is stored already is not stored again. `memlane.tiers.conformance` tests what can be seen
    from outside. It cannot test what a medium that hangs, or changes bytes, does to a tier.

    Calls take keys, each 1 to 255 bytes, and row numbers in the same order, all different; else
    they raise `InvalidType` or `InvalidArgument` and change nothing. After `close` every call
    raises `Closed`, in a forked child `WrongProcess`. Timeouts are in seconds.

    The constructors of memlane's tiers share these arguments:

    * rows: a writable, contiguous buffer of shape (blocks, bytes), which must not be freed before
      the tier is closed.
    * namespace: separates equal keys of different models, revisions, dtypes, layouts or tenants.
      Blocks of other namespaces are not found.
    * timeout: of `store`, `load`, `drain` and `close` in seconds, unless the call is given one.
    * connections: 1 to 64, each with a thread.

    Attributes:
        is_read_only: nothing can be stored; a `TierChain` does not try.
        stores_once: the tier looks itself whether a key is there before it stores; a `TierChain`
            does not ask.
        logs_outages: the tier logs that it does not answer; a `TierChain` does not repeat it.
        fails_in_part: that a call fails says nothing about those of other keys; a `TierChain` goes
            on asking.
        is_private: no other process stores there, so `TierChain.clear(epoch=...)` empties it.
    """

    is_read_only = False
    stores_once = False
    logs_outages = False
    fails_in_part = False
    is_private = False
    _namespace: Namespace | None = None

    @classmethod
    def __subclasshook__(cls, other: type) -> bool:
        """A class with all the methods is a tier, whether it derives from this one or not."""
        if cls is Tier:
            names = {name for each in other.__mro__ for name in vars(each)}
            if cls.__abstractmethods__ <= names:
                return True
        return NotImplemented  # type: ignore[no-any-return]

    @abstractmethod
    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Returns for each key whether it is there, without waiting and without counting as a use.
        Raises `Closed`, `WrongProcess`, `InvalidType`, `InvalidArgument`.

        Returns:
            True or False; None if it is unknown yet. The tier finds out in the background, and
            `fileno` is readable once it knows more.
        """

    def peek(self, keys: Sequence[bytes]) -> list[bool | None]:
        """As `has`, but no request asks for these keys: statistics do not count it. Raises as
        `has`."""
        return self.has(keys)

    @abstractmethod
    def hold(self, keys: Sequence[bytes]) -> TierPin:
        """Pins what is there, until the end of the block or of a load that begins in it. Raises as
        `has`."""

    @abstractmethod
    def store(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to store rows, which must not change before the report. A key that is there
        already is not stored again. Counts as a use of each key: a request has asked for it, and
        computed what was not there.

        Args:
            keys: what to find them by.
            ids: rows, in the same order.
            timeout: seconds until blocks that are not stored yet are reported as failed; None:
                the tier's own.

        Raises:
            InvalidType, InvalidArgument: a key or a row is not valid, or comes twice; nothing is
                stored.
            Closed, WrongProcess: as `has`.
        """

    def store_evicted(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Stores what a cache before the tier evicts, which is no use of it. That cache calls
        `touch` for keys that requests ask for and that neither has. `timeout` is in seconds. Raises
        as `store`."""
        return self.store(keys, ids, timeout)

    @abstractmethod
    def load(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to load blocks into rows. Counts as a use of each key. Until the report comes the
        rows' contents are undefined, and after it those of blocks that are not ok.

        Args:
            keys: what they were stored under.
            ids: rows, in the same order.
            timeout: seconds until blocks that are not loaded yet are reported as missing; None:
                the tier's own.

        Raises:
            InvalidType, InvalidArgument: a key or a row is not valid, or comes twice; nothing is
                loaded.
            Closed, WrongProcess: as `has`.
        """

    @abstractmethod
    def poll(self) -> list[Done]:
        """Returns what is done, or too late, and was not returned before, in any order. Does not
        wait. Raises `Closed`, `WrongProcess`."""

    @abstractmethod
    def fileno(self) -> int:
        """Returns a descriptor that is readable while `poll` has something to report, for select,
        epoll and asyncio. It may be readable without a report: then an answer of `has` has
        changed. It is the tier's: never read or close it. Raises as `poll`."""

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts as a use of each key, also of those that are not there; earlier keys are kept
        longest. Raises as `has`."""

    @abstractmethod
    def forget(self, keys: Sequence[bytes]) -> None:
        """Removes these keys; what is being stored under them is removed once it is stored. They
        are gone after a restart, too. Raises as `has`, and `SystemFault` if the tier does not
        answer or refuses."""

    @abstractmethod
    def clear(self) -> None:
        """Removes everything of this namespace, also for a later restart. Raises `Closed`,
        `WrongProcess`, and `SystemFault` as `forget`."""

    def set_epoch(self, epoch: str | bytes | int) -> None:
        """Separates what is stored from now on from what was stored under another epoch, such as
        the version of the weights: blocks of another epoch are not found, of whatever process, and
        stay where they are. All processes that share a tier must give the same epoch for the same
        weights, also after a restart. The first epoch is "". What is under way keeps its own.

        Raises:
            InvalidType: it is neither text nor bytes nor a number.
            Unsupported: the tier has no epochs.
            Closed, WrongProcess: as `has`.
        """
        self.has([])
        if self._namespace is None:  # of a user's tier that has not overridden this
            raise Unsupported(f"a {type(self).__name__} has no epochs")
        self._namespace.set_epoch(epoch)

    @abstractmethod
    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is under way, not even what was reported as failed. The reports are
        left for `poll`.

        Args:
            timeout: in seconds; None: the tier's own.

        Returns:
            False if something was still under way then.

        Raises:
            InvalidType, InvalidArgument: `timeout` is no number.
            Closed, WrongProcess: as `has`.
        """

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Drains and closes the tier: the rows are the caller's again. What was not polled is
        lost. Closing it again does nothing.

        Args:
            timeout: as of `drain`.

        Raises:
            TimedOut: something is still under way, and the tier is still open: its rows must stay.
            InvalidType, InvalidArgument: as `drain`.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()


def has_epochs(tier: Tier) -> bool:
    """Returns whether `set_epoch` works: a tier of a user's may lack it."""
    own = getattr(type(tier), "set_epoch", None)
    return own is not None and (own is not Tier.set_epoch or tier._namespace is not None)


class Rows:
    """The shape of a buffer of rows. It does not keep the buffer.

    Attributes:
        count: how many rows.
        nbytes: bytes of each.
    """

    def __init__(self, buffer: Any) -> None:
        """Raises:
        InvalidType: it is no buffer.
        InvalidArgument: it is not writable, two-dimensional and contiguous, or is empty.
        """
        try:
            view = memoryview(buffer)
        except (TypeError, ValueError):  # ValueError: an array of dates
            kind = type(buffer).__name__
            raise InvalidType(f"rows must be a writable buffer of numbers, not {kind}") from None
        with view:
            shape = view.shape or ()
            if "O" in view.format:
                raise InvalidType("rows must be bytes or numbers, not Python objects")
            if view.readonly or len(shape) != 2 or not view.c_contiguous or not view.nbytes:
                kind = "read-only" if view.readonly else f"shape {shape}, strides {view.strides}"
                raise InvalidArgument(
                    f"rows must be a writable, contiguous buffer of two dimensions, not {kind}"
                )
            self.count = shape[0]
            self.nbytes = view.nbytes // shape[0]

    def ids(self, count: int, ids: npt.ArrayLike) -> npt.NDArray[np.int32]:
        """Returns the row numbers, one for each of `count` keys.

        Raises:
            InvalidType, InvalidArgument: they are no row numbers, twice the same, or too few.
        """
        try:
            rows = np.asarray(ids)
        except ValueError:  # lists of different lengths
            raise InvalidArgument("ids must be row numbers, one for each key") from None
        if rows.size and rows.dtype.kind not in "iu":
            raise InvalidType(f"ids must be row numbers, not an array of {rows.dtype}")
        if rows.shape != (count,):
            raise InvalidArgument(
                f"ids must have {count} rows, one for each key, not shape {rows.shape}"
            )
        if rows.size and not 0 <= rows.min() <= rows.max() < self.count:
            raise InvalidArgument(
                f"ids must be 0 to {self.count - 1}, not {rows.min()} to {rows.max()}"
            )
        if len(np.unique(rows)) != len(rows):
            raise InvalidArgument("ids must not have a row twice")
        return rows.astype(np.int32)


class Namespace:
    """Separates equal keys of different models, revisions or tenants.

    Attributes:
        id: 16 bytes.
    """

    def __init__(self, namespace: str | bytes) -> None:
        """Raises InvalidType: it is neither text nor bytes."""
        if isinstance(namespace, str):
            namespace = namespace.encode(errors="surrogatepass")
        if not isinstance(namespace, bytes):
            raise InvalidType(f"namespace must be str or bytes, not {type(namespace).__name__}")
        self.id = hashlib.sha256(namespace).digest()[:16]
        self._seed = hashlib.sha256(self.id)

    def set_epoch(self, epoch: str | bytes | int) -> None:
        """Changes the digests of all keys; "" leads to the first ones. Raises InvalidType."""
        if isinstance(epoch, int) and not isinstance(epoch, bool):
            epoch = str(epoch)
        if isinstance(epoch, str):
            epoch = epoch.encode(errors="surrogatepass")
        if not isinstance(epoch, bytes):
            kind = type(epoch).__name__
            raise InvalidType(f"epoch must be str, bytes or int, not {kind}")
        self._seed = hashlib.sha256(self.id + (hashlib.sha256(epoch).digest() if epoch else b""))

    def digests(self, keys: Sequence[bytes]) -> list[bytes]:
        """Returns 24 bytes for each key of one call, which no other namespace has.

        Raises:
            InvalidType, InvalidArgument: a key is not 1 to 255 bytes, or comes twice.
        """
        digests, seed = [], self._seed  # of one epoch, though another thread changes it
        for key in distinct(keys):
            digest = seed.copy()
            digest.update(key)
            digests.append(digest.digest()[:DIGEST_BYTES])
        return digests


def distinct(keys: Sequence[bytes]) -> list[bytes]:
    """Returns the keys of one call as a list.

    Raises:
        InvalidType, InvalidArgument: one is not bytes, has a wrong length, or comes twice.
    """
    found = items_of("keys", keys)
    for key in found:
        if not isinstance(key, bytes):
            raise InvalidType(f"a key must be bytes, not {type(key).__name__}")
        if not 1 <= len(key) <= 255:
            raise InvalidArgument(f"a key must have 1 to 255 bytes, not {len(key)}")
    if len(set(found)) != len(found):
        raise InvalidArgument("a key must not come twice in one call")
    return found


def capacity_in_bytes(capacity: int | str, name: str = "capacity", least: int = 1) -> int:
    """Returns a number of bytes; `capacity` may be text such as "200GiB".

    Raises:
        InvalidType, InvalidArgument: it is neither.
    """
    if not isinstance(capacity, str):
        return integer_from(name, capacity, least, 1 << 62)
    found = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([KMGT]iB|)\s*", capacity)
    if found is None:
        raise InvalidArgument(
            f"{name} must be bytes, or text as 500MiB, 200GiB or 2TiB, not {capacity!r}"
        )
    return integer_from(name, int(float(found[1]) * _UNITS[found[2]]), least, 1 << 62)


def text(name: str, value: object) -> str:
    """Returns `value`. Raises InvalidType if it is not a string."""
    if not isinstance(value, str):
        raise InvalidType(f"{name} must be a string, not {type(value).__name__}")
    return value
