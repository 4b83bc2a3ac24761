"""Metrics of memlane's segments for Prometheus, read from outside: no thread, no call and no cost
in the processes that are watched.

from prometheus_client import REGISTRY
REGISTRY.register(memlane.metrics.Collector())

`memlane export` serves the same over HTTP, and needs no prometheus-client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memlane._importing import fork_waits

if TYPE_CHECKING:
    from memlane.metrics.collector import Collector

__all__ = ["Collector"]


def __getattr__(name: str) -> Any:
    """`Collector` alone needs prometheus-client, so it is imported when it is first used."""
    if name != "Collector":
        raise AttributeError(f"module 'memlane.metrics' has no attribute {name!r}")
    with fork_waits:
        from memlane.metrics.collector import Collector

    return Collector
