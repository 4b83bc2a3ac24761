"""A worker's side of moving blocks between its device and memlane's offload region.

    scheduler                                     workers (each: its device pool, its cells)
      blocks are full, or a sequence is resumed:
        choose the blocks and the rows
      broadcast the pairs with the decision  ────▶  copy full blocks out of the device
                                                    copy resumed blocks back into it
                                                    compute the step

All workers map one region. Row `b` has block `b` of each worker, cell next to cell, so a tier
stores whole rows (`backing.py`). The "device" is the worker's own memory; with a GPU it would be a
tensor there, and the calls would be the same.
"""

import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy.typing as npt

from memlane import SharedOffloadRegion, copy_blocks

from .batching import Decision
from .kv_cache import Array
from .paging import Pair

Blocks = npt.NDArray[Any]


class RegionPlan(NamedTuple):
    """The geometry that all workers agree on."""

    instance: str
    """Names the file; must be unique."""
    blocks: int
    workers: int
    cell_bytes: int
    """Size of a block of the worker that holds the most heads."""

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return self.blocks * self.workers * self.cell_bytes


class RegionStart(NamedTuple):
    """The start of a worker's region."""

    path: str
    seconds: float
    """Time to create or join it, and to populate the worker's own cells."""


@dataclass
class Moved:
    """A worker's moves: the bytes and the duration in ns of each call of `copy_blocks`.

    One call moves all blocks of a step in one direction.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class Offload:
    """One worker's cells of the region and its device pool; measures each move."""

    def __init__(self, plan: RegionPlan, rank: int, device: Array) -> None:
        """Create the region, or join it; the first axis of `device` counts its blocks.

        Because all workers and the scheduler are `participants`, the file's name is unlinked once
        all of them have mapped it: nothing is left behind, however they end.
        """
        self._rank, self._device = rank, device
        self.moved = Moved()
        self._enter(plan)

    def restart(self, plan: RegionPlan) -> None:
        """Go on in another region, because a worker was replaced: the old one has no name."""
        self._region.cleanup()
        self._enter(plan)

    def _enter(self, plan: RegionPlan) -> None:
        started = time.monotonic()
        self._region = SharedOffloadRegion(
            plan.instance,
            plan.total_bytes,
            plan.blocks,
            self._rank,
            plan.workers,
            plan.cell_bytes,
            participants=plan.workers + 1,
        )
        self.start = RegionStart(self._region.mmap_path, time.monotonic() - started)
        self._host = self._region.create_next_array(self._device[0].nbytes)

    def move(self, decision: Decision) -> None:
        """Copy blocks out of the device, then others back into it."""
        if pairs := decision["swap_out"]:
            self.moved.swap_out.append(_timed(self._device, self._host, pairs))
        if pairs := decision["swap_in"]:
            self.moved.swap_in.append(_timed(self._host, self._device, pairs))

    def close(self) -> None:
        """Leave the region; the last worker to leave removes it."""
        self._region.cleanup()


def _timed(source: Blocks, target: Blocks, pairs: list[Pair]) -> tuple[int, int]:
    started_ns = time.monotonic_ns()
    nbytes = copy_blocks(source, target, pairs)
    return nbytes, time.monotonic_ns() - started_ns
