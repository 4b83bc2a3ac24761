"""Assigns blocks of the KV cache to sequences, and decides which must be moved before a step.

A block has the keys and values of `BLOCK_SIZE` tokens of one sequence, in all layers. The blocks of
a sequence can be anywhere in a pool; its block table lists them. All workers move the same blocks,
each for its own heads, so the scheduler keeps one set of tables for all of them.

A sequence must have its blocks on the device to run. What is computed is also saved in a cache,
under keys that tell what is in a block, so that a paused sequence finds its blocks again, and a
request finds those of another one that began alike. This module only decides; `backing.py` is the
cache, and `offload.py` moves the bytes.
"""

import hashlib
from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple, Protocol

BLOCK_SIZE = 16
"""Tokens of a block."""

LEAST_REGION = 16
"""Rows of the smallest region."""

Pair = tuple[int, int]
"""A block to copy, and the block of the other pool to copy it to."""


class Pools(NamedTuple):
    """The number of blocks that each worker has."""

    device: int
    region: int
    """Rows of the offload region; 0 means no region."""


class BlockCache(Protocol):
    """The place of blocks that are not on the device: in rows of the region, or behind it."""

    def find(self, keys: list[bytes]) -> list[int]:
        """Return the rows of the leading run of keys that are there, until `settle`."""
        ...

    def prefetch(self, keys: list[bytes]) -> None:
        """Somebody will look for them soon."""

    def save(self, keys: list[bytes]) -> dict[bytes, int]:
        """Return a row for each key that is not there, as far as there is room, to be written to
        before `settle`."""
        ...

    def settle(self) -> None:
        """The step has been computed: its rows have been read, and written to."""


class PoolTooSmall(ValueError):
    """A request could never run, not even alone."""


def blocks_of(tokens: int) -> int:
    """Return how many blocks that many tokens need; the last one may be partly filled."""
    return -(-tokens // BLOCK_SIZE)


def keys_of(image: str, tokens: bytes, shared: int, split: int) -> list[bytes]:
    """Return a key for each block of these tokens; the last block may be partly filled.

    The first `shared` tokens were computed as any other prompt that begins with them; how the
    others were depends on the length of the whole prompt, `split`. Blocks of equal keys are equal
    bit by bit.
    """
    content = hashlib.sha256(image.encode())
    keys = []
    for at in range(0, len(tokens), BLOCK_SIZE):
        block = tokens[at : at + BLOCK_SIZE]
        content.update(block)
        is_shared = at + len(block) <= shared
        end = b"" if is_shared else split.to_bytes(4, "big")
        keys.append(hashlib.sha256(content.digest() + end).digest())
    return keys


def plan_pools(
    lengths: Iterable[int],
    at_work: int,
    device: int | None,
    offload: bool,
    region: int | None = None,
) -> Pools:
    """Return pools for sequences of up to these lengths in tokens, `at_work` at a time.

    Without `offload` the device has room for the `at_work` longest. With it the device has `device`
    blocks; by default a third of those, but enough for the longest. The region has `region` rows;
    by default room for all that can leave the device and all that comes to it in one step, which is
    less than all sequences need.

    Raises `PoolTooSmall` if the longest sequence does not fit the device alone.
    """
    longest = nlargest(at_work, map(blocks_of, lengths))
    enough = sum(longest)
    if not offload:
        return Pools(enough, 0)
    if device is None:
        device = max(longest[0], enough // 3)
    if device < longest[0]:
        raise PoolTooSmall(
            f"the longest request needs {longest[0]} blocks of {BLOCK_SIZE} tokens to run, "
            f"and there would be {device}"
        )
    if region is None:
        region = max(LEAST_REGION, 2 * device)
    return Pools(device, region)


class BlockTables:
    """Assigns the device's blocks to sequences. Paused ones have none."""

    def __init__(self, pools: Pools) -> None:
        """Start with all blocks free."""
        self.pools = pools
        self._free = list(reversed(range(pools.device)))
        self._tables: dict[int, list[int]] = {}
        self.pauses = 0
        """The number of pauses of sequences."""

    @property
    def used(self) -> int:
        """Blocks of the device that are in use."""
        return self.pools.device - len(self._free)

    def is_on_device(self, sequence: int) -> bool:
        """True if the sequence has blocks there; otherwise it is paused, or has not started."""
        return sequence in self._tables

    def table(self, sequence: int) -> list[int]:
        """Return the device blocks that hold the sequence's tokens, in order."""
        return list(self._tables[sequence])

    def make_room(self, lengths: dict[int, int], others: Iterable[int]) -> dict[int, list[int]]:
        """Give each sequence in `lengths` device blocks for that many tokens.

        All of them together must fit. Pauses as many of `others` as necessary, one by one, and
        returns the blocks that they had.
        """
        missing = sum(
            blocks_of(tokens) - len(self._tables.get(sequence, ()))
            for sequence, tokens in lengths.items()
        )
        paused = {}
        for sequence in others:
            if missing <= len(self._free):
                break
            if sequence in self._tables:
                paused[sequence] = self._tables[sequence]
                self.drop(sequence)
                self.pauses += 1
        for sequence, tokens in lengths.items():
            table = self._tables.setdefault(sequence, [])
            while len(table) < blocks_of(tokens):
                table.append(self._free.pop())
        return paused

    def drop(self, sequence: int) -> None:
        """Free the blocks of a sequence."""
        self._free.extend(self._tables.pop(sequence))

    def clear(self) -> None:
        """Free all blocks: what was in them is lost."""
        self._free = list(reversed(range(self.pools.device)))
        self._tables = {}
