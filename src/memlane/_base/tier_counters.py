"""The counters of pools and local tiers: one table, which their segments, `memlane ls` and `top`,
the metrics and the documentation follow. A new counter is one row here and one field of
native/tiers/shown_facts.hpp, both at the end, and a field of `PoolStatistics` or `DiskStatistics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TierCounter:
    """One counter.

    Attributes:
        name: as in `Segment.counters`, statistics and metrics.
        kind: a counter only grows; a gauge is the state now.
        help: what it counts; the unit is blocks unless the text names another.
        of: what has it: a pool, a disk tier, or both.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    of: Literal["both", "disk", "pool"]


TIER_COUNTERS = (
    TierCounter("blocks", "gauge", "Blocks that a tier or pool has room for.", "both"),
    TierCounter("used", "gauge", "Blocks that are stored.", "both"),
    TierCounter("reserved", "gauge", "Blocks that are being stored.", "both"),
    TierCounter("pinned", "gauge", "Blocks that are being read.", "both"),
    TierCounter("accesses", "counter", "Blocks that were asked for.", "both"),
    TierCounter("hits", "counter", "Of those, blocks that were there.", "both"),
    TierCounter("stored", "counter", "Blocks that were stored.", "both"),
    TierCounter("evicted", "counter", "Blocks that were evicted.", "both"),
    TierCounter("declined", "counter", "Blocks that the policy did not admit.", "both"),
    TierCounter("loaded", "counter", "Blocks that were read from the disk.", "disk"),
    TierCounter("missed", "counter", "Loads of blocks that were not there.", "disk"),
    TierCounter("errors", "counter", "Blocks that the disk failed to read or write.", "disk"),
    TierCounter("corrupt", "counter", "Blocks whose checksum was wrong.", "disk"),
    TierCounter("expired", "counter", "Blocks that were not done at their deadline.", "disk"),
    TierCounter("queue", "gauge", "Blocks that wait for the disk.", "disk"),
    TierCounter("stalled", "gauge", "1 while the disk does not answer.", "disk"),
    TierCounter(
        "retired", "gauge", "Slots that are not used because the disk refused them.", "disk"
    ),
    TierCounter(
        "dropped", "counter", "Evicted blocks that were lost for lack of spare blocks.", "pool"
    ),
    TierCounter("detached", "gauge", "1 if the tier's files were deleted or moved.", "disk"),
    TierCounter("lookups", "counter", "Keys that were looked up.", "disk"),
    TierCounter("found", "counter", "Of those, keys of blocks that were there.", "disk"),
    TierCounter("written", "counter", "Bytes that were written to the disk.", "disk"),
    TierCounter(
        "left_out", "gauge", "Tiers behind a pool that do not answer, and are not tried.", "pool"
    ),
)
"""In the order of the segment."""

TIER_TIMES = {
    "store_seconds": "Time from a store until a block is stored, or has failed.",
    "load_seconds": "Time from a load until a block is loaded, or has failed.",
}
"""Histograms of a disk tier, in the order of the segment."""
