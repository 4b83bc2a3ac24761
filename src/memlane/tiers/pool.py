"""An index of keys and blocks with pins, reservations and eviction; no memory, only numbers."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Literal, Protocol, Self, get_args, runtime_checkable

import numpy as np
import numpy.typing as npt

from memlane import _native
from memlane._base.arguments import integer_from, items_of
from memlane._base.diagnosis import warn
from memlane._base.labels import checked_label
from memlane._base.segments import name_of, new_id
from memlane.errors import (
    InvalidArgument,
    InvalidType,
    MemlaneError,
    Unsupported,
    WrongProcess,
    system_fault,
)

PolicyName = Literal["lru", "arc", "s3fifo", "tuned"]
Ids = npt.NDArray[np.int32]
_MOST_BLOCKS = (1 << 31) - 1


@dataclass(frozen=True)
class PoolStatistics:
    """Counters of a pool since it was made, and its state now.

    Attributes:
        policy: its name, or that of its class.
        blocks: the capacity.
        used: blocks that are stored, reserved, or forgotten and still pinned.
        reserved, pinned: blocks, now.
        accesses: keys that `pin` and `touch` were asked for.
        hits: accesses to keys that were stored.
        misses: the others.
        prefix_hits: of `pin`, keys of which all keys before them were stored, too.
        stored: blocks that were committed.
        evicted: blocks that made room for others.
        declined: keys that the policy did not want to be stored.
        dropped: blocks that a `TierChain` lost, because no block was spare when they were evicted.
        left_out: tiers of a `TierChain` that did not answer, and are not tried for a while.
    """

    policy: str
    blocks: int
    used: int
    reserved: int
    pinned: int
    accesses: int
    hits: int
    prefix_hits: int
    stored: int
    evicted: int
    declined: int
    dropped: int
    left_out: int

    @property
    def misses(self) -> int:
        """Accesses to keys that were not stored."""
        return self.accesses - self.hits


@dataclass(frozen=True)
class Forecast:
    """Counts of a pool of another capacity.

    Attributes:
        accesses: keys that were asked for.
        hits: those that it would have had.
        prefix_hits: of these, those with all keys before them.
    """

    accesses: int
    hits: int
    prefix_hits: int


@runtime_checkable
class Policy(Protocol):
    """Chooses which key goes when a pool is full; called by the pool, which nobody may call
    meanwhile.

    What it raises reaches the caller of the pool, and the call has stored nothing; but an error of
    `remove` is reported as one of a finalizer. A key that `evict` returns is forgotten, without a
    call of `remove`.
    """

    def touch(self, key: bytes) -> None:
        """A stored key was asked for. What it raises reaches the caller."""

    def insert(self, key: bytes) -> bool:
        """A block is about to be reserved for the key. False: it is declined. Where the pool is
        full `evict` is asked first, and declines by None. What it raises reaches the caller."""
        ...

    def evict(self, incoming: bytes, is_free: Callable[[bytes], bool]) -> bytes | None:
        """The key that makes room for `incoming`; None: none does.

        Args:
            incoming: the key that needs a block.
            is_free: whether a key is stored and not pinned, until `evict` returns. To return
                another one raises `InvalidArgument`.
        """
        ...

    def remove(self, key: bytes) -> None:
        """The key is forgotten, or was not stored after all. Must not raise."""

    def clear(self) -> None:
        """All keys are forgotten. What it raises reaches the caller, and nothing is forgotten."""


class BlockPool:
    """Assigns the blocks of a cache to keys.

    It has no memory of its own: blocks are numbers, for the rows of a region or of any other
    buffer. It belongs to one process; its threads take turns. A key is 1 to 255 bytes, a digest as
    a rule. A call with n keys costs one call into native code, and for each key some 50 ns if they
    were stored in that order, 300 ns if at random::

        with pool.pin(keys) as pin:          # what is there stays while it is read
            read(pin.ids)
        with pool.reserve(pin.missing) as new:
            for key, row in new:             # those that got a block; not always all
                write(key, row)
            new.commit()

    Policies, beside those of your own (`Policy`), are `lru`; `arc` (Megiddo and Modha, FAST '03);
    `s3fifo` (Yang et al., SOSP '23); and `tuned`: a segment on probation, a protected segment and a
    list of keys that were evicted, whose sizes are chosen while it runs, by what caches of other
    sizes, of LRU, of ARC and of one that seldom admits a key would have hit. A thread counts that,
    beside the calls. It may decline keys that nobody has asked for before, and in loops over more
    keys than fit most of them.

    Its counters are in 8 KiB of /dev/shm without a name, where `memlane.inspect` reads them.
    """

    def __init__(
        self, blocks: int, policy: PolicyName | Policy = "tuned", *, name: str | None = None
    ) -> None:
        """Args:
            blocks: the capacity.
            policy: which block is evicted; a name, or an object that decides.
            name: what people call the pool; commands and metrics show it.

        Raises:
            InvalidType, InvalidArgument: for an argument that is none.
            OutOfMemory: this process may not have the memory for it.
        """
        count = integer_from("blocks", blocks, 1, _MOST_BLOCKS)
        self._policy = checked_policy(policy)
        self.name = checked_label(name)
        self._generation = _native.fork_generation()
        try:
            self._native = _native.BlockPool(count, policy)
        except MemoryError:
            why = f"cannot allocate a pool of {count} blocks"
            raise system_fault(errno.ENOMEM, why) from None
        self._backing: Backing | None = None
        show(self._native, self.name)

    def pin(self, keys: Sequence[bytes]) -> Pin:
        """Pins the blocks of the leading run of keys that are stored: they are not evicted until
        the pin is released. Counts as an access of every key, the last first, so that of a prefix
        the end goes before the start.

        Raises:
            InvalidType, InvalidArgument: a key is not bytes, or too long; nothing has changed.
            WrongProcess: in a forked child.
        """
        asked = items_of("keys", keys)
        return Pin(self, asked, self._own().pin(asked))

    def reserve(self, keys: Sequence[bytes]) -> Reservation:
        """Reserves a block for each key that has none, evicting others as long as some are neither
        pinned nor reserved: for as many keys as fit, the first ones first. A key can be skipped,
        so iterate over the reservation, which yields each reserved key with its block. Nobody
        finds such a block before it is committed.

        Raises:
            InvalidType, InvalidArgument, WrongProcess: as `pin`.
        """
        asked = items_of("keys", keys)
        native = self._own()
        if self._backing is not None:
            return self._backing.answer(asked)
        held, blocks, evicted, _ = native.reserve(asked)
        return Reservation(self, asked, held, np.frombuffer(blocks, np.int32), evicted)

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns whether each is stored. No access.

        Raises:
            InvalidType, InvalidArgument, WrongProcess: as `pin`.
        """
        return self._own().has(items_of("keys", keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        """Counts as an access of every key, the last first.

        Raises:
            InvalidType, InvalidArgument, WrongProcess: as `pin`.
        """
        self._own().touch(items_of("keys", keys))

    def forget(self, keys: Sequence[bytes]) -> None:
        """Nobody finds these keys any more. A block that is pinned or reserved is free when its
        holder has released it.

        Raises:
            InvalidType, InvalidArgument, WrongProcess: as `pin`.
        """
        self._own().forget(items_of("keys", keys))

    def clear(self) -> None:
        """Forgets all keys, and which were evicted. The sizes that `tuned` has chosen stay.

        Raises:
            WrongProcess: as `pin`.
        """
        self._own().clear()

    def statistics(self) -> PoolStatistics:
        """Counts since the pool was made, and how its blocks are used now.

        Raises:
            WrongProcess: as `pin`.
        """
        return PoolStatistics(policy=self._policy, **self._own().statistics())

    def forecast(self, more_blocks: int) -> Forecast:
        """Returns what a pool with so many more blocks would have hit since the first call with
        that number: the first answer is zero. It begins empty, and keeps every access from then on,
        which costs up to 0.5 us a key (`tuned`: some 3 us).

        Args:
            more_blocks: beyond the capacity; 0 for what this pool itself hits from empty.

        Raises:
            InvalidType, InvalidArgument: `more_blocks` is no number of blocks.
            Unsupported: the policy is an object.
            WrongProcess: as `pin`.
        """
        if self._policy not in get_args(PolicyName):
            raise Unsupported("a pool with a policy of your own has no forecast")
        capacity = _MOST_BLOCKS - self._own().statistics()["blocks"]
        more = integer_from("more_blocks", more_blocks, 0, capacity)
        counts = self._own().forecast(more)
        return Forecast(counts["accesses"], counts["hits"], counts["prefix_hits"])

    def _own(self) -> _native.BlockPool:
        if self._generation != _native.fork_generation():
            raise WrongProcess("this pool belongs to the process that made it")
        return self._native


def show(native: _native.BlockPool | _native.DiskTier, label: str) -> None:
    """Lets `memlane.inspect` see its counters, and what people call it."""
    identity = new_id()
    try:
        native.show(identity, name_of(identity), label)
    except MemlaneError as error:
        warn("memlane top will not show a pool or tier of this process: %s", error)


def checked_policy(policy: PolicyName | Policy) -> str:
    """Its name.

    Raises:
        InvalidType, InvalidArgument: it is none.
    """
    if isinstance(policy, str):
        if policy not in get_args(PolicyName):
            names = ", ".join(get_args(PolicyName))
            raise InvalidArgument(f"policy must be one of {names}, not {policy!r}")
        return str(policy)
    if not isinstance(policy, Policy):
        kind = type(policy).__name__
        raise InvalidType(f"policy must be a name or a memlane.tiers.Policy, not {kind}")
    return type(policy).__name__


class Pin:
    """Blocks that are not evicted for now. A context manager; leaving it releases them, as does
    dropping the last reference.

    Attributes:
        ids: int32, the blocks of the first keys, in their order.
        missing: the keys that are not stored, each once; empty only if all keys are pinned. A key
            behind the first that is missing may be stored: it is in neither.
    """

    ids: Ids
    missing: list[bytes]

    def __init__(self, pool: BlockPool, keys: list[bytes], held: _native.PinnedBlocks) -> None:
        self._pool = pool
        self._keys = keys
        self._held = held  # releases them, at the latest when it is dropped
        self.ids = np.frombuffer(held.blocks(), np.int32)
        self.missing = self._not_stored()

    def release(self) -> None:
        """Ends the pin. Never raises; calling it again does nothing."""
        self._held.release()

    def extend(self, other: Pin) -> None:
        """Takes over the blocks of a pin of the keys that follow the pinned ones, or of the first
        of them, and looks again which keys are missing. Raises `WrongProcess`, as `pin`."""
        self._held.take(other._held)
        self.ids = np.concatenate((self.ids, other.ids))
        self.missing = self._not_stored()

    def _not_stored(self) -> list[bytes]:
        rest = self._keys[len(self.ids) :]
        if not rest:
            return rest
        first, *others = dict.fromkeys(rest)
        stored = self._pool.has(others) if others else []
        return [first, *(key for key, has in zip(others, stored, strict=True) if not has)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Reservation:
    """Blocks for keys that are being stored. A context manager; leaving it without a commit gives
    them back, as does dropping the last reference.

    Iterating over it yields (key, block) for each key that has a block now, in the order in which
    they were asked for; `len()` is their number.

    Attributes:
        keys: those that were asked for, all of them.
        ids: int32, for each of `keys` its block, or `NO_BLOCK` if it was skipped.
        NO_BLOCK: below 0, and an index of no buffer: using it raises IndexError in numpy and
            torch, where -1 would be the last row, the block of another key.
        skipped: keys without a block: stored or reserved already, declined by the policy, or
            without room.
        evicted: the keys whose blocks these were.
    """

    NO_BLOCK: Final = -(1 << 31)
    keys: list[bytes]
    ids: Ids
    skipped: list[bytes]
    evicted: list[bytes]

    def __init__(
        self,
        pool: BlockPool,
        keys: list[bytes],
        held: _native.ReservedBlocks,
        blocks: Ids,
        evicted: list[bytes],
    ) -> None:
        self._pool = pool
        self._held = held  # gives them back, at the latest when it is dropped
        self._is_reserved = blocks >= 0
        self.keys = keys
        self.ids = np.where(self._is_reserved, blocks, np.int32(self.NO_BLOCK))
        self.skipped = [keys[at] for at in np.flatnonzero(~self._is_reserved)]
        self.evicted = evicted

    def commit(self, ok: npt.ArrayLike | None = None) -> None:
        """Publishes the blocks; once only.

        Args:
            ok: a bool for each key of `keys`: False gives its block back; a skipped key has none,
                so its value does not count. None: all are published.

        Raises:
            InvalidArgument: it was committed or given back already, or `ok` has another length.
            InvalidType: `ok` is not an array of bools.
            WrongProcess: in a forked child.
        """
        mask = np.ones(len(self.ids), np.bool_) if ok is None else np.asarray(ok)
        if mask.dtype != np.bool_ and mask.size:
            raise InvalidType(f"ok must be an array of bools, not of {mask.dtype}")
        if mask.shape != self.ids.shape:
            raise InvalidArgument(f"ok must have {len(self.ids)} values, not shape {mask.shape}")
        self._pool._own()
        self._held.commit(mask.astype(np.bool_)[self._is_reserved].tobytes())

    def release(self) -> None:
        """Gives back what was not committed. Never raises; calling it again does nothing."""
        self._held.release()

    def __iter__(self) -> Iterator[tuple[bytes, int]]:
        places = np.flatnonzero(self._is_reserved).tolist()
        return zip((self.keys[at] for at in places), self.ids[places].tolist(), strict=True)

    def __len__(self) -> int:
        return int(self._is_reserved.sum())

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.release()


class Backing:
    """The interface that only a `TierChain` uses of its pool: some blocks are spare, and one that
    is evicted stays aside, with its bytes, while a spare one takes its place.

    A pool has at most one. Every call but `end` raises `WrongProcess` in a forked child.

    Attributes:
        answer: answers the calls of the pool's `reserve`, from `begin` on.
    """

    answer: Callable[[list[bytes]], Reservation]

    def __init__(self, pool: BlockPool, spare: int) -> None:
        """Raises InvalidArgument: the pool has one, or not so many free blocks and one more."""
        if pool._backing is not None:
            raise InvalidArgument("pool has a chain already")
        self._pool = pool
        native = pool._own()
        if native.statistics()["blocks"] < 2 or native.set_aside(spare) < spare:
            native.set_aside(0)
            raise InvalidArgument(f"pool must have {spare} free blocks, and one more, for a chain")

    def begin(self, answer: Callable[[list[bytes]], Reservation]) -> None:
        """Lets `answer` answer the pool's `reserve` from now on."""
        self.answer = answer
        self._pool._backing = self

    def end(self) -> None:
        """The pool is as any other from now on; spare blocks are free."""
        self._pool._backing = None
        self.give_up()

    def give_up(self) -> None:
        """Makes the spare blocks free."""
        self._pool._own().set_aside(0)

    def reserve(self, keys: list[bytes]) -> tuple[Reservation, list[tuple[bytes, int]]]:
        """Returns the reservation, and each evicted key with the block that keeps its bytes, or -1
        if none does."""
        held, blocks, evicted, aside = self._pool._own().reserve(keys)
        made = Reservation(self._pool, keys, held, np.frombuffer(blocks, np.int32), evicted)
        rows = np.frombuffer(aside, np.int32).tolist()
        return made, [*zip(evicted, rows, strict=True)]

    def aside(self) -> set[int]:
        """Returns the blocks that keep the bytes of evicted ones."""
        return {*np.frombuffer(self._pool._own().aside(), np.int32).tolist()}

    def reuse(self, blocks: set[int]) -> None:
        """Makes blocks that are aside spare again."""
        self._pool._own().reuse(np.fromiter(blocks, np.int32).tobytes())

    def pin_stored(
        self, first: int, most: int
    ) -> tuple[_native.PinnedBlocks, list[tuple[bytes, int]], int]:
        """Pins up to `most` stored blocks from number `first` on, without an access. Returns the
        pin, which ends with its last reference; keys and blocks; and where to go on."""
        held, keys, next_block = self._pool._own().pin_stored(first, most)
        blocks = np.frombuffer(held.blocks(), np.int32).tolist()
        return held, [*zip(keys, blocks, strict=True)], next_block

    def count_dropped(self, blocks: int) -> None:
        """Counts evicted blocks that are lost."""
        self._pool._own().count_dropped(blocks)

    def set_left_out(self, tiers: int) -> None:
        """Shows how many tiers are not tried for now."""
        self._pool._own().set_left_out(tiers)


class Evictor:
    """A pool for an engine that stores whatever it computes, and only asks which key is to go, such
    as vLLM's primary tier: nothing is declined, and its blocks' numbers mean nothing.

    Calls raise `InvalidType` or `InvalidArgument` for keys that are not bytes.
    """

    def __init__(self, blocks: int, policy: PolicyName) -> None:
        self._native = _native.BlockPool(blocks, policy)

    def insert(self, keys: list[bytes]) -> None:
        """Stores and pins keys that are not there. Raises InvalidArgument: no block is free, or a
        key is there."""
        self._native.insert(keys)

    def pin(self, keys: list[bytes]) -> None:
        """Keeps keys from going."""
        self._native.set_pinned(keys, True)

    def unpin(self, keys: list[bytes]) -> None:
        """Ends a pin of each key that has one."""
        self._native.set_pinned(keys, False)

    def touch(self, keys: list[bytes]) -> None:
        """Counts as an access of every key, the last first."""
        self._native.touch(keys)

    def forget(self, keys: list[bytes]) -> None:
        """Drops keys."""
        self._native.forget(keys)

    def evict(self, count: int, kept: list[bytes]) -> list[bytes] | None:
        """Drops and returns so many keys that are neither pinned nor of `kept`. Returns None, and
        drops none, if there are less."""
        return self._native.evict(count, kept)
