"""Disk tiers for tests: blocks by number, with contents that follow from it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from memlane.tiers import DiskTier
from memlane.tiers.conformance import content, key, wait_for
from tests.support import PATIENCE


def capacity_of(blocks: int, row_bytes: int) -> int:
    """Bytes on disk for so many blocks."""
    slot = -(-row_bytes // 4096) * 4096
    headers = -(-blocks * 64 // 4096) * 4096
    uses = 4096 + -(-blocks * 8 // 4096) * 4096
    return 4096 + headers + uses + blocks * slot


def tier_on(folder: Path, rows: Any, capacity: int, **options: Any) -> DiskTier:
    """A tier of so many blocks, whose calls do not expire."""
    nbytes = capacity_of(capacity, rows.shape[1])
    return DiskTier(folder, rows, nbytes, **{"policy": "lru", "timeout": PATIENCE, **options})


def check_all(tier: DiskTier, rows: Any, numbers: Iterable[int]) -> int:
    """Loads each of these blocks that is there, and compares it; returns how many were right."""
    loaded = 0
    for number in numbers:
        rows[0] = 0
        if wait_for(tier, tier.load([key(number)], [0])).ok[0]:
            np.testing.assert_array_equal(rows[0], content(number, rows.shape[1]))
            loaded += 1
    return loaded
