"""What every tier does and promises: rows of a buffer are stored under keys, and loaded again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NewType, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from memlane.errors import InvalidArgument, InvalidType

Ticket = NewType("Ticket", int)
DIGEST_BYTES = 24
CHANGED = "a block is not what was stored"
"""The error of a load whose bytes, or key, are others: the block's fault, not the tier's."""


@dataclass(frozen=True, eq=False)
class Done:
    """What became of a `store` or a `load`. From its report on, the tier writes to none of its
    rows; it may still read one whose store was late, to no effect.

    Attributes:
        ticket: what the call returned.
        ok: a bool for each key, in their order: of a load whether the row has the block, of a store
            whether the tier has it.
        error: the first thing that went wrong, or None; that a key is not there, or was declined,
            is no error.
        bytes: of the blocks that were moved.
        seconds: since the call.
    """

    ticket: Ticket
    ok: npt.NDArray[np.bool_]
    error: str | None
    bytes: int
    seconds: float


class Held(Protocol):
    """Blocks that are not evicted until they are released.

    Attributes:
        there: a bool for each key: whether the tier has it.
    """

    there: list[bool]

    def release(self) -> None:
        """Releases the blocks. Never raises; calling it again does nothing."""


@runtime_checkable
class Tier(Protocol):
    """Blocks behind a buffer of rows, one block a row.

    Every tier promises: a submitted block is reported exactly once, at its deadline at the latest;
    a load that fails, or finds other bytes than were stored, is a miss of that key alone; a key
    that is stored already is not stored again. `memlane.tiers.conformance` tests what can be seen
    from outside: not what a medium that hangs, or changes bytes, does to it.

    Calls take keys, each 1 to 255 bytes, and row numbers in the same order, all different; else
    they raise `InvalidType` or `InvalidArgument`, and have done nothing. After `close` they raise
    `Closed`, in a forked child `WrongProcess`.
    """

    def has(self, keys: Sequence[bytes]) -> list[bool | None]:
        """Whether each is there; None: unknown, ask again. At once, and without side effects.
        Raises what all calls raise."""
        ...

    def hold(self, keys: Sequence[bytes]) -> AbstractContextManager[Held]:
        """What is there stays until the end of the block, or of the load that began in it. Raises
        what all calls raise."""
        ...

    def store(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to store rows. They must not change before the report. Raises what all calls
        raise.

        Args:
            keys: what to find them by.
            ids: rows, in the same order.
            timeout: seconds until blocks that are not stored yet are reported as failed; None:
                the tier's own.
        """
        ...

    def load(
        self, keys: Sequence[bytes], ids: npt.ArrayLike, timeout: float | None = None
    ) -> Ticket:
        """Begins to load blocks into rows. What the rows have before the report is nobody's.
        Raises what all calls raise.

        Args:
            keys: what they were stored under.
            ids: rows, in the same order.
            timeout: seconds until blocks that are not loaded yet are reported as missing; None:
                the tier's own.
        """
        ...

    def poll(self) -> list[Done]:
        """What is done, or too late, by now, and was not polled before. Does not wait. Raises what
        all calls raise."""
        ...

    def fileno(self) -> int:
        """A descriptor that is readable while `poll` has something to do. Raises what all calls
        raise."""
        ...

    def touch(self, keys: Sequence[bytes]) -> None:
        """They were used: others are evicted first. The first keys outlive the last. Raises what
        all calls raise."""

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody finds them any more, also after a restart. Raises what all calls raise, and
        `SystemFault` if the tier does not answer."""

    def clear(self) -> None:
        """Nobody finds anything any more, also after a restart. Raises as `forget`."""

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until nothing is under way; False if `timeout` seconds were too few. The reports
        are `poll`'s. Raises what all calls raise."""
        ...

    def close(self, timeout: float | None = None) -> None:
        """Drains, and gives the rows back. Raises `TimedOut` if `timeout` seconds were too few; the
        rows must then stay. Closing again does nothing."""


class Rows:
    """Of a buffer: how many rows of what size. It does not keep the buffer.

    Attributes:
        count: of rows.
        nbytes: of each.
    """

    def __init__(self, buffer: Any) -> None:
        """Raises:
        InvalidType: it is no buffer.
        InvalidArgument: it is not writable, two-dimensional and contiguous, or is empty.
        """
        try:
            view = memoryview(buffer)
        except TypeError:
            kind = type(buffer).__name__
            raise InvalidType(f"rows must be a writable buffer, not {kind}") from None
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
        """The row numbers, one for each of `count` keys.

        Raises:
            InvalidType, InvalidArgument: they are no row numbers, twice the same, or too few.
        """
        rows = np.asarray(ids)
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
    """What the same keys mean different blocks under: model, revision, tenant.

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

    def digests(self, keys: Sequence[bytes]) -> list[bytes]:
        """24 bytes for each key of one call, which no other namespace has.

        Raises:
            InvalidType, InvalidArgument: a key is not 1 to 255 bytes, or comes twice.
        """
        digests = []
        for key in distinct(keys):
            digest = self._seed.copy()
            digest.update(key)
            digests.append(digest.digest()[:DIGEST_BYTES])
        return digests


def distinct(keys: Sequence[bytes]) -> list[bytes]:
    """The keys of one call.

    Raises:
        InvalidType, InvalidArgument: one is not bytes, has a wrong length, or comes twice.
    """
    found = list(keys)
    for key in found:
        if not isinstance(key, bytes):
            raise InvalidType(f"a key must be bytes, not {type(key).__name__}")
        if not 1 <= len(key) <= 255:
            raise InvalidArgument(f"a key must have 1 to 255 bytes, not {len(key)}")
    if len(set(found)) != len(found):
        raise InvalidArgument("a key must not come twice in one call")
    return found
