"""What stands behind a region that is full: which block has which key, and slower places."""

from memlane.tiers.disk import DiskStatistics, DiskTier, Hold, Latency
from memlane.tiers.pool import BlockPool, Forecast, Pin, Policy, PoolStatistics, Reservation
from memlane.tiers.tier import Done, Held, Ticket, Tier

__all__ = [
    "BlockPool",
    "DiskStatistics",
    "DiskTier",
    "Done",
    "Forecast",
    "Held",
    "Hold",
    "Latency",
    "Pin",
    "Policy",
    "PoolStatistics",
    "Reservation",
    "Ticket",
    "Tier",
]
