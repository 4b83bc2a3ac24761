"""Tiers for blocks that no longer fit a region, and the pools that index them: names only."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memlane._importing import fork_waits
from memlane.tiers.chain import ChainStatistics, TierChain
from memlane.tiers.disk import DiskStatistics, DiskTier, Latency
from memlane.tiers.disk_array import DiskArray
from memlane.tiers.linked import TierUse
from memlane.tiers.pool import BlockPool, Forecast, Pin, Policy, PoolStatistics, Reservation
from memlane.tiers.remote.tier import RemoteStatistics
from memlane.tiers.tier import Done, Ticket, Tier, TierPin

if TYPE_CHECKING:
    from memlane.tiers.remote.mooncake import MooncakeTier
    from memlane.tiers.remote.objects import ObjectTier
    from memlane.tiers.remote.redis import RedisTier
    from memlane.tiers.remote.replicas import ReplicaTier

# Imported when they are used: they need extras, and bring modules that others do not want.
_REMOTE = {
    "MooncakeTier": "mooncake",
    "ObjectTier": "objects",
    "RedisTier": "redis",
    "ReplicaTier": "replicas",
}


def __getattr__(name: str) -> Any:
    if name not in _REMOTE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with fork_waits:
        return getattr(import_module(f"{__name__}.remote.{_REMOTE[name]}"), name)


__all__ = [
    "BlockPool",
    "ChainStatistics",
    "DiskArray",
    "DiskStatistics",
    "DiskTier",
    "Done",
    "Forecast",
    "Latency",
    "MooncakeTier",
    "ObjectTier",
    "Pin",
    "Policy",
    "PoolStatistics",
    "RedisTier",
    "RemoteStatistics",
    "ReplicaTier",
    "Reservation",
    "Ticket",
    "Tier",
    "TierChain",
    "TierPin",
    "TierUse",
]
