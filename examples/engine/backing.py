"""The scheduler's side of the offload region: which block is in which row, and the tier behind it.

    device  ──copy_blocks──▶  region  ──evicted──▶  a disk, a Redis server, a bucket
            ◀──────────────           ◀──missing──

Workers see rows only. The scheduler maps the same region, without a cell of its own: a row has one
block of all workers, so a tier stores and loads whole rows.
"""

import logging
import os
import shutil
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from memlane import SharedOffloadRegion
from memlane.tiers import (
    BlockPool,
    ChainStatistics,
    DiskTier,
    Pin,
    PoolStatistics,
    Reservation,
    Tier,
    TierChain,
)

from .offload import RegionPlan

PATIENCE = 0.2
"""Seconds that a step waits for blocks of a tier; what is late is computed again."""

DISK_ROWS = 16
"""Times the rows of the region that a disk has room for."""


FOLDERS = "memlane-demo-"
"""The beginning of the names of temporary folders; a process id follows."""


class BackingStatistics(NamedTuple):
    """Counts of the blocks that were found, and where."""

    pool: PoolStatistics
    chain: ChainStatistics


def open_tier(place: str | None, rows: memoryview, namespace: str) -> Tier:
    """Open a tier by its URL: `redis://`, `rediss://` or `unix://`, or one of a bucket.

    None: on a disk, in a temporary folder whose files have no name once they are open, so that they
    end with the process. What one that was killed while it opened them has left is removed.
    """
    if place is None:
        _sweep()
        logging.getLogger("memlane").addFilter(_is_news)
        prefix = f"{FOLDERS}{os.getpid()}-"
        with tempfile.TemporaryDirectory(prefix=prefix, dir=_disk()) as folder:
            return DiskTier(Path(folder), rows, DISK_ROWS * rows.nbytes, namespace=namespace)
    if place.startswith(("redis://", "rediss://", "unix://")):
        from memlane.tiers import RedisTier

        return RedisTier(place, rows, namespace=namespace)
    from memlane.tiers import ObjectTier

    return ObjectTier(place, rows, namespace=namespace)


def check_tier(place: str) -> None:
    """Raise what opening that tier would raise."""
    with closing(open_tier(place, memoryview(bytearray(1)).cast("B", (1, 1)), "")):
        pass


def _disk() -> str | None:
    """Return where temporary files are on a disk, which those in /tmp often are not."""
    place = os.environ.get("TMPDIR", "/var/tmp")
    return place if os.access(place, os.W_OK) else None


def _is_news(record: logging.LogRecord) -> bool:
    """Leave out that the tier's files were deleted: they are, on purpose."""
    return "were deleted or moved" not in record.getMessage()


def _sweep() -> None:
    for folder in Path(_disk() or tempfile.gettempdir()).glob(f"{FOLDERS}*-*"):
        pid = folder.name.removeprefix(FOLDERS).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)  # if it is ours


class Backing:
    """A `BlockCache` of the region's rows, and a tier. It belongs to the scheduler."""

    def __init__(self, plan: RegionPlan, place: str | None, model: str) -> None:
        """Join the region of the workers, as the last one: it has no name from then on.

        `model` tells whose blocks these are: others find none of them.
        """
        self._place = place
        self._namespace = f"{model}, {plan.workers} workers, numpy {np.__version__}"
        self._pins: list[Pin] = []
        self._new: list[Reservation] = []
        self._open(plan)

    def _open(self, plan: RegionPlan) -> None:
        with ExitStack() as stack:
            region = SharedOffloadRegion(
                *(plan.instance, plan.total_bytes, plan.blocks, None, plan.workers),
                plan.cell_bytes,
                participants=plan.workers + 1,
            )
            stack.callback(region.cleanup)
            rows = memoryview(region.create_kv_memoryview())  # type: ignore[arg-type]
            stack.callback(rows.release)
            self._tier = open_tier(self._place, rows, self._namespace)
            stack.callback(self._tier.close)
            self._pool = BlockPool(plan.blocks, "lru")
            # What a step fills is saved at once, and evicts as much at once.
            self._chain = TierChain(self._pool, rows, [self._tier], spare=plan.blocks // 4)
            # A disk's files have no name: nobody could load what is stored at the end.
            stack.callback(self._chain.close, store=self._place is not None)
            stack.callback(self.settle)
            self._stack = stack.pop_all()

    def restart(self, plan: RegionPlan) -> None:
        """Go on in another region: what this one has is lost."""
        self.close()
        self._open(plan)

    # As a `BlockCache`

    def find(self, keys: list[bytes]) -> list[int]:
        pin = self._chain.fetch(keys, PATIENCE)
        self._pins.append(pin)
        rows: list[int] = pin.ids.tolist()
        return rows

    def prefetch(self, keys: list[bytes]) -> None:
        self._chain.prefetch(keys)

    def save(self, keys: list[bytes]) -> dict[bytes, int]:
        new = self._pool.reserve(keys)
        self._new.append(new)
        return dict(iter(new))

    def settle(self) -> None:
        for new in self._new:
            new.commit()
        for pin in self._pins:
            pin.release()
        self._new, self._pins = [], []

    def statistics(self) -> BackingStatistics:
        """Count since it was opened, or has restarted."""
        return BackingStatistics(self._pool.statistics(), self._chain.statistics())

    def close(self) -> None:
        """Leave the region, once what is under way has ended."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
