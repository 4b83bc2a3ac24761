"""Which blocks of the KV cache are whose, and what has to be moved before a step.

A block has the keys and values of `BLOCK_SIZE` tokens of one sequence, in all layers. The blocks of
a sequence lie anywhere in a pool; its block table says where. All workers do the same, each with
the heads that it holds, so the scheduler keeps one set of tables for all of them.

There are two pools: one on the device, where a sequence must be to run, and the offload region,
where all have room who are at work. Nothing here moves a byte: `offload.py` does.
"""

from collections.abc import Iterable
from heapq import nlargest
from typing import NamedTuple

BLOCK_SIZE = 16
"""Tokens of a block."""

Pair = tuple[int, int]
"""A block to be copied, and the one it is copied to, in the other pool."""


class Pools(NamedTuple):
    """How many blocks each worker has."""

    device: int
    region: int
    """In its cells of the offload region; 0 is for no region."""


class Moves(NamedTuple):
    """What is to be copied before a step, and in this order: what leaves makes the room."""

    swap_out: list[Pair]
    """Device to region."""
    swap_in: list[Pair]
    """Region to device."""


class PoolTooSmall(ValueError):
    """There is a request that could never run, not even alone."""


def blocks_of(tokens: int) -> int:
    """Return how many blocks so many tokens fill, the last one perhaps in part."""
    return -(-tokens // BLOCK_SIZE)


def plan_pools(lengths: Iterable[int], at_work: int, device: int | None, offload: bool) -> Pools:
    """Return pools for sequences of up to these lengths, `at_work` at a time, in tokens.

    Without `offload` the device has room for the longest all at once. With it the region has, and
    the device has `device` blocks, or a third of those if that is None.

    Raises `PoolTooSmall` if the longest of all does not fit the device alone.
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
    """Gives blocks to sequences. Who is paused has all of its blocks in the region, else none."""

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
        """Whether the sequence has blocks there; who has none is paused, or was never started."""
        return sequence in self._tables

    def is_paused(self, sequence: int) -> bool:
        """Whether the sequence is in the region."""
        return sequence in self._paused

    def table(self, sequence: int) -> list[int]:
        """Return the blocks on the device that have the sequence's tokens, in their order."""
        return list(self._tables[sequence])

    def make_room(self, lengths: dict[int, int], others: Iterable[int]) -> Moves:
        """Let sequences, by number, have as many tokens on the device as is said there.

        All of them together must fit. Of `others` as many are paused as it takes, one by one.
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
        """Take back the blocks of a sequence that has just run for the last time."""
        self._free_device.extend(self._tables.pop(sequence))

    def _pause(self, sequence: int) -> list[Pair]:
        table = self._tables.pop(sequence)
        away = [self._free_region.pop() for _ in table]
        self._paused[sequence] = away
        self._free_device.extend(table)
        self.pauses += 1
        return list(zip(table, away, strict=True))

    def _resume(self, sequence: int) -> list[Pair]:
        away = self._paused.pop(sequence)
        self._free_region.extend(away)  # nobody leaves any more before these are read
        table = [self._free_device.pop() for _ in away]
        self._tables[sequence] = table
        return list(zip(away, table, strict=True))
