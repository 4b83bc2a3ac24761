"""Which sequence owns which blocks of the KV cache, and which must be moved before a step.

A block has the keys and values of `BLOCK_SIZE` tokens of one sequence, in all layers. The blocks of
a sequence can be anywhere in a pool; its block table lists them. All workers move the same blocks,
each for its own heads, so the scheduler keeps one set of tables for all of them.

There are two pools: the device, where a sequence must be to run, and the offload region, which has
room for all sequences at work. This module only decides; `offload.py` moves the bytes.
"""

from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

BLOCK_SIZE = 16
"""Tokens of a block."""

Pair = tuple[int, int]
"""A block to copy, and the block of the other pool to copy it to."""


class Pools(NamedTuple):
    """How many blocks each worker has."""

    device: int
    region: int
    """Blocks in its cells of the offload region; 0 means no region."""


class Moves(NamedTuple):
    """What to copy before a step, in this order: swapping out frees the blocks to swap in to."""

    swap_out: list[Pair]
    """Device to region."""
    swap_in: list[Pair]
    """Region to device."""


class PoolTooSmall(ValueError):
    """A request could never run, not even alone."""


def blocks_of(tokens: int) -> int:
    """Return how many blocks that many tokens need; the last one may be partly filled."""
    return -(-tokens // BLOCK_SIZE)


def plan_pools(lengths: Iterable[int], at_work: int, device: int | None, offload: bool) -> Pools:
    """Return pools for sequences of up to these lengths in tokens, `at_work` at a time.

    Without `offload` the device has room for the `at_work` longest. With it the region has, and the
    device has `device` blocks; by default a third of the region's, but enough for the longest.

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
    return Pools(device, enough)


class BlockTables:
    """Assigns blocks to sequences. Paused ones have all their blocks in the region, others none."""

    def __init__(self, pools: Pools) -> None:
        """Start with all blocks free."""
        self.pools = pools
        self._free_device = list(reversed(range(pools.device)))
        self._free_region = list(reversed(range(pools.region)))
        self._tables: dict[int, list[int]] = {}
        self._paused: dict[int, list[int]] = {}
        self.pauses = 0
        """How often a sequence was paused so far."""

    @property
    def used(self) -> int:
        """Blocks of the device that are in use."""
        return self.pools.device - len(self._free_device)

    def is_on_device(self, sequence: int) -> bool:
        """Whether the sequence has blocks there; otherwise it is paused, or has not started."""
        return sequence in self._tables

    def is_paused(self, sequence: int) -> bool:
        """Whether the sequence is in the region."""
        return sequence in self._paused

    def table(self, sequence: int) -> list[int]:
        """Return the device blocks that hold the sequence's tokens, in order."""
        return list(self._tables[sequence])

    def make_room(self, lengths: dict[int, int], others: Iterable[int]) -> Moves:
        """Give each sequence in `lengths` device blocks for that many tokens.

        All of them together must fit. Pauses as many of `others` as necessary, one by one.
        """
        missing = sum(
            blocks_of(tokens) - len(self._tables.get(sequence, ()))
            for sequence, tokens in lengths.items()
        )
        moves = Moves([], [])
        for sequence in others:
            if missing <= len(self._free_device):
                break
            if sequence in self._tables:
                moves.swap_out.extend(self._pause(sequence))
        for sequence, tokens in lengths.items():
            if sequence in self._paused:
                moves.swap_in.extend(self._resume(sequence))
            table = self._tables.setdefault(sequence, [])
            while len(table) < blocks_of(tokens):
                table.append(self._free_device.pop())
        return moves

    def drop(self, sequence: int) -> None:
        """Free the blocks of a sequence that has just run for the last time."""
        self._free_device.extend(self._tables.pop(sequence))

    def clear(self) -> None:
        """Free all blocks: what was in them is lost."""
        self._free_device = list(reversed(range(self.pools.device)))
        self._free_region = list(reversed(range(self.pools.region)))
        self._tables, self._paused = {}, {}

    def _pause(self, sequence: int) -> list[Pair]:
        table = self._tables.pop(sequence)
        away = [self._free_region.pop() for _ in table]
        self._paused[sequence] = away
        self._free_device.extend(table)
        self.pauses += 1
        return list(zip(table, away, strict=True))

    def _resume(self, sequence: int) -> list[Pair]:
        away = self._paused.pop(sequence)
        self._free_region.extend(away)  # no swap-out follows before these are read
        table = [self._free_device.pop() for _ in away]
        self._tables[sequence] = table
        return list(zip(away, table, strict=True))
