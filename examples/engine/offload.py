"""Blocks on their way between device and host, through memlane's offload region: a worker's side.

    scheduler                                     workers (each: its device pool, its cells)
      somebody must be paused, somebody comes back:
        choose the blocks on both sides
      broadcast the pairs with the decision  ────▶  copy what leaves out of the device
                                                    copy what comes back into it
                                                    compute the step

The region is one mapping of all workers: row `b` has block `b` of each of them, one cell beside the
other, as a tier that stores whole rows elsewhere would want it. The "device" is memory of the
worker; with a GPU it would be a tensor there, and the calls the same.
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
    """Names the file; nobody else may have it."""
    blocks: int
    workers: int
    cell_bytes: int
    """A block of the worker that holds the most heads."""

    @property
    def total_bytes(self) -> int:
        """The size of the file."""
        return self.blocks * self.workers * self.cell_bytes


class RegionStart(NamedTuple):
    """How a worker came to its region."""

    path: str
    seconds: float
    """To create or join it, and to have the pages of its own cells."""


@dataclass
class Moved:
    """What a worker has moved: per call of `copy_blocks` the bytes and the ns that it took.

    There is one call for all the blocks of a step in one direction.
    """

    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)


class Offload:
    """One worker's cells of the region, beside its device pool, with a stopwatch."""

    def __init__(self, plan: RegionPlan, rank: int, device: Array) -> None:
        """Create the region, or join it; the first axis of `device` counts its blocks.

        As all workers are `participants`, the file's name is gone as soon as all of them have
        mapped it: nothing stays behind however they end.
        """
        started = time.monotonic()
        self._region = SharedOffloadRegion(
            plan.instance,
            plan.total_bytes,
            plan.blocks,
            rank,
            plan.workers,
            plan.cell_bytes,
            participants=plan.workers,
        )
        self.start = RegionStart(self._region.mmap_path, time.monotonic() - started)
        self.moved = Moved()
        self._device = device
        self._host = self._region.create_next_array(device[0].nbytes)

    def move(self, decision: Decision) -> None:
        """Copy what leaves the device, then what comes back to it."""
        if pairs := decision["swap_out"]:
            self.moved.swap_out.append(_timed(self._device, self._host, pairs))
        if pairs := decision["swap_in"]:
            self.moved.swap_in.append(_timed(self._host, self._device, pairs))

    def close(self) -> None:
        """Leave the region; the last one does away with it."""
        self._region.cleanup()


def _timed(source: Blocks, target: Blocks, pairs: list[Pair]) -> tuple[int, int]:
    started_ns = time.monotonic_ns()
    nbytes = copy_blocks(source, target, pairs)
    return nbytes, time.monotonic_ns() - started_ns
