"""Tiers and a cache policy that a stock vLLM loads by `module_path` (0.32 and 0.33).

`"spec_name": "TieringOffloadingSpec"` names them in `kv_connector_extra_config`:

    "eviction_policy": "TunedPolicy", "cache_policy_module_path": "memlane.engines.vllm.tiers",
    "secondary_tiers": [
        {"type": "DiskTier", "module_path": "memlane.engines.vllm.tiers",
         "path": "/nvme/kv", "capacity": "200GiB"},
        {"type": "RedisTier", "module_path": "memlane.engines.vllm.tiers",
         "url": "redis://cache:6379/0"}]
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.tiering.base import JobResult

from memlane._importing import fork_waits
from memlane.engines.vllm._tier_manager import RemoteTierManager, TierManager, log

if TYPE_CHECKING:
    from memlane.tiers import TierPin
    from memlane.tiers.inventory import Inventory

_LATENCIES = ("store", "load")
_QUANTILES = ("p50", "p99")
_COUNTERS = {
    "stored": "Blocks that were stored.",
    "loaded": "Blocks that were loaded.",
    "missed": "Loads of blocks that were not there any more.",
    "declined": "Blocks that the policy did not want, or for which there was no room.",
    "evicted": "Blocks that made room for others.",
    "errors": "Reads and writes that the system refused.",
    "corrupt": "Blocks that were not what was stored.",
    "expired": "Blocks that missed their deadline.",
    "lookups": "Blocks that were looked up.",
    "found": "Of those, blocks that were there.",
    "written": "Bytes that were written to the disk.",
}
_GAUGES = {
    "used": "Bytes of the blocks that are stored.",
    "capacity": "Bytes of blocks that fit.",
    "queue": "Blocks that wait for the disk.",
    "stalled": "1 while the disk does not answer.",
    "retired": "Slots that are not used because the disk refused them.",
    **{
        f"{what}_seconds_{quantile}": f"Seconds until a block is done, {what}, {quantile}."
        for what in _LATENCIES
        for quantile in _QUANTILES
    },
}


class DiskTier(TierManager):
    """`memlane.tiers.DiskTier` behind vLLM's primary tier. Its keys are that class's arguments;
    `opener` is by default the data-parallel index; a `path` that is a list makes a `DiskArray`.

    A block that the policy declines counts as stored, because vLLM has nothing to do about it.
    """

    what = "a DiskTier"
    needed = ("path", "capacity")
    optional = (
        *("namespace", "policy", "timeout", "direct", "opener", "margin", "quota", "ttl", "name"),
    )
    prefix = "vllm:memlane_disk_tier_"
    counters = _COUNTERS
    gauges = _GAUGES

    def _open(self, config: Any, rows: memoryview, own: dict[str, Any]) -> Any:
        with fork_waits:
            from memlane.tiers import DiskArray
            from memlane.tiers import DiskTier as Disk

        self._held: dict[bytes, TierPin] = {}  # found, and not asked for yet
        replica = config.parallel.data_parallel_index
        own.setdefault("opener", str(replica))
        own.setdefault("name", f"vllm.disk[{replica}]")
        self._keys = f"{own['opener']}.keys"
        path, capacity = own.pop("path"), own.pop("capacity")
        tier: Disk | DiskArray
        if isinstance(path, list):
            tier = DiskArray(path, rows, capacity, **own)
            self._disks = tier.disks
        else:
            tier = Disk(path, rows, capacity, **own)
            self._disks = {path: tier}
        for folder, disk in self._disks.items():
            begun = disk.statistics()
            way = "O_DIRECT" if disk.is_direct else "page cache"
            log.info(
                "a disk tier in %s, opener %s: %d blocks of %d bytes, %s by %s; "
                "%d are there already",
                *(folder, own["opener"], begun.slots, self._block_size_bytes),
                *(way, begun.engine, begun.recovered),
            )
        return tier

    def _new_inventory(self) -> Inventory:
        with fork_waits:
            from memlane.tiers.inventory import ArrayInventory, DiskInventory

        each = {
            disk: DiskInventory(disk, os.path.join(folder, self._keys))
            for folder, disk in self._disks.items()
        }
        return ArrayInventory(self._tier, each) if len(each) > 1 else each.popitem()[1]

    def _find(self, key: bytes, req_context: Any) -> LookupResult:
        if key in self._held:
            return LookupResult.HIT
        (is_there,) = self._tier.has([key])  # which counts it
        if is_there:
            held = self._tier.hold([key])
            (is_there,) = held.there
            if is_there:
                self._held[key] = held
        return self._note(key, bool(is_there))

    def submit_load(self, job_metadata: Any) -> None:
        super().submit_load(job_metadata)
        for key in job_metadata.keys:  # the load holds them from here on
            self._release(key)

    def _release(self, key: bytes) -> None:
        if (held := self._held.pop(key, None)) is not None:
            held.release()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._tier.touch(list(keys))

    def on_schedule_end(self, context: Any) -> None:
        for key in list(self._held):  # those that found no room in the primary tier
            self._release(key)

    def _reset(self) -> None:
        self.on_schedule_end(None)
        super()._reset()

    def shutdown(self) -> None:
        self.on_schedule_end(None)
        super().shutdown()

    def _figure(self, statistics: Any, name: str) -> Any:
        what, is_latency, quantile = name.partition("_seconds_")
        if not is_latency:
            return getattr(statistics, name)
        return getattr(getattr(statistics, f"{what}_latency"), quantile)


class RedisTier(RemoteTierManager):
    """`memlane.tiers.RedisTier` behind vLLM's primary tier. Its keys are that class's arguments;
    `options` has those of redis-py's connection."""

    what = "a RedisTier"
    tier = "RedisTier"
    needed = ("url",)
    optional = ("namespace", "timeout", "connections", "ttl", "options")
    prefix = "vllm:memlane_redis_tier_"


class ObjectTier(RemoteTierManager):
    """`memlane.tiers.ObjectTier` behind vLLM's primary tier. Its keys are that class's arguments;
    `options` has those of obstore's `from_url`."""

    what = "an ObjectTier"
    tier = "ObjectTier"
    needed = ("url",)
    optional = ("namespace", "timeout", "connections", "options")
    default_timeout = 10.0
    prefix = "vllm:memlane_object_tier_"


class MooncakeTier(RemoteTierManager):
    """`memlane.tiers.MooncakeTier` behind vLLM's primary tier. Its keys are that class's
    arguments."""

    what = "a MooncakeTier"
    tier = "MooncakeTier"
    needed = ("master",)
    optional = (
        *("namespace", "timeout", "connections", "segment", "metadata", "protocol"),
        *("device", "host", "log"),
    )
    prefix = "vllm:memlane_mooncake_tier_"


class ReplicaTier(RemoteTierManager):
    """`memlane.tiers.ReplicaTier`: what other data-parallel replicas of this host have stored by a
    `DiskTier` in the same folder. Whatever vLLM offers it counts as stored: it only reads. `own` is
    by default the data-parallel index, as is the `opener` of the disk."""

    what = "a ReplicaTier"
    tier = "ReplicaTier"
    needed = ("path",)
    optional = ("own", "namespace", "timeout", "threads")
    default_locality = None
    prefix = "vllm:memlane_replica_tier_"

    def _open(self, config: Any, rows: memoryview, own: dict[str, Any]) -> Any:
        self._offered: list[JobResult] = []
        own.setdefault("own", str(config.parallel.data_parallel_index))
        return super()._open(config, rows, own)

    def submit_store(self, job_metadata: Any) -> None:
        self._offered.append(JobResult(job_metadata.job_id, True, None, 0.0, 0))

    def get_finished_jobs(self) -> Iterable[JobResult]:
        offered, self._offered = self._offered, []
        return [*super().get_finished_jobs(), *offered]


class TunedPolicy(CachePolicy):  # type: ignore[misc]  # vLLM is not here
    """The policy `tuned` of `memlane.tiers.BlockPool`, for vLLM's primary tier.

    vLLM stores whatever it computes, so nothing is declined.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self._chunks: dict[bytes, Any] = {}
        self._new: dict[bytes, bool] = {}  # not in the pool yet; whether each is free to go
        self.clear()

    def get(self, key: bytes) -> Any:
        return self._chunks.get(key)

    def insert(self, key: bytes, chunk: Any, req_context: Any = None) -> None:
        self._chunks[key] = chunk
        self._new[key] = chunk.ref_cnt == 0

    def _filled(self) -> Any:
        """The pool, with what was inserted since: the last first, so that of a prefix the end goes
        before the start."""
        if self._new:
            new, self._new = self._new, {}
            self._pool.insert([*reversed(new)])  # pinned, until vLLM says otherwise
            self._pool.unpin([key for key, is_free in new.items() if is_free])
        return self._pool

    def remove(self, key: bytes) -> None:
        pool = self._filled()
        if self._chunks.pop(key).ref_cnt != 0:
            pool.unpin([key])
        pool.forget([key])

    def touch(self, keys: Iterable[bytes], req_context: Any) -> None:
        self._filled().touch(list(keys))

    def on_store_miss(self, keys: Iterable[bytes], req_context: Any) -> None:
        """An access of each, before it is inserted."""
        self._filled().touch(list(keys))

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[bytes]],
        insertion_only_keys: set[bytes],
        reused_keys: set[bytes],
        req_context: Any,
    ) -> None:
        """An access of each that was there; the others were counted when they were missed."""
        for keys in key_groups:
            self._filled().touch([key for key in keys if key not in insertion_only_keys])

    def evict(self, n: int, protected: set[bytes]) -> list[tuple[bytes, Any]] | None:
        evicted = self._filled().evict(n, list(protected))
        if evicted is None:
            return None
        return [(key, self._chunks.pop(key)) for key in evicted]

    def clear(self) -> None:
        with fork_waits:
            from memlane.tiers.pool import Evictor

        self._pool = Evictor(max(1, self.cache_capacity), "tuned")  # vLLM allows 0
        self._chunks.clear()
        self._new.clear()

    def mark_evictable(self, key: bytes) -> None:
        self._filled().unpin([key])

    def mark_non_evictable(self, key: bytes) -> None:
        self._filled().pin([key])
