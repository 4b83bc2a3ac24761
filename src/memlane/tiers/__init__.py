"""What stands behind a region that is full: which block has which key, and slower places."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from memlane.tiers.chain import ChainStatistics, TierChain, TierUse
from memlane.tiers.disk import DiskStatistics, DiskTier, Hold, Latency
from memlane.tiers.pool import BlockPool, Forecast, Pin, Policy, PoolStatistics, Reservation
from memlane.tiers.remote import RemoteHold, RemoteStatistics
from memlane.tiers.tier import Done, Held, Ticket, Tier

if TYPE_CHECKING:
    from memlane.tiers.mooncake import MooncakeTier
    from memlane.tiers.objects import ObjectTier
    from memlane.tiers.redis import RedisTier
    from memlane.tiers.replicas import ReplicaTier

# They need extras, and bring modules that others do not want.
_REMOTE = {
    "MooncakeTier": "mooncake",
    "ObjectTier": "objects",
    "RedisTier": "redis",
    "ReplicaTier": "replicas",
}


def __getattr__(name: str) -> Any:
    if name not in _REMOTE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_REMOTE[name]}"), name)


__all__ = [
    "BlockPool",
    "ChainStatistics",
    "DiskStatistics",
    "DiskTier",
    "Done",
    "Forecast",
    "Held",
    "Hold",
    "Latency",
    "MooncakeTier",
    "ObjectTier",
    "Pin",
    "Policy",
    "PoolStatistics",
    "RedisTier",
    "RemoteHold",
    "RemoteStatistics",
    "ReplicaTier",
    "Reservation",
    "Ticket",
    "Tier",
    "TierChain",
    "TierUse",
]
