"""What stands behind a region that is full: which block has which key, and which is to go."""

from memlane.tiers.pool import BlockPool, Forecast, Pin, Policy, PoolStatistics, Reservation

__all__ = ["BlockPool", "Forecast", "Pin", "Policy", "PoolStatistics", "Reservation"]
