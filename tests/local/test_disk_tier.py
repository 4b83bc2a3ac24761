"""The disk tier on real files: what every tier promises, and what only its own files show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memlane.tiers import DiskTier
from memlane.tiers.conformance import TierConformance


def capacity_of(blocks: int, row_bytes: int) -> int:
    """Bytes for so many blocks."""
    slot = -(-row_bytes // 4096) * 4096
    return 4096 + blocks * (slot + 64)


class TestDiskTier(TierConformance):
    """Past the page cache where that is possible."""

    is_local = True
    direct: bool | None = None

    def open(self, place: Path, rows: Any, capacity: int = 100, **options: Any) -> DiskTier:
        """On a folder of the test's."""
        nbytes = capacity_of(capacity, self.row_bytes)
        options = {"policy": "lru", "direct": self.direct, **options}
        return DiskTier(place / "kv", rows, nbytes, **options)


class TestBuffered(TestDiskTier):
    """Through the page cache, with rows that are no multiple of its pages."""

    row_bytes = 5000
    direct = False


class TestUnaligned(TestDiskTier):
    """Past the page cache, with rows that are not aligned as O_DIRECT wants."""

    row_bytes = 300_001
    direct = True


class TestTuned(TestDiskTier):
    """With the default policy."""

    def open(self, place: Path, rows: Any, capacity: int = 100, **options: Any) -> DiskTier:
        """As the others."""
        return super().open(place, rows, capacity, **{"policy": "tuned", **options})
