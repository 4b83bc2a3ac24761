"""A disk tier and a cache policy that a stock vLLM loads by `module_path` (0.32 and 0.33).

`"spec_name": "TieringOffloadingSpec"` names them in `kv_connector_extra_config`:

    "eviction_policy": "TunedPolicy", "cache_policy_module_path": "memlane.engines.vllm.tiers",
    "secondary_tiers": [{"type": "DiskTier", "module_path": "memlane.engines.vllm.tiers",
                         "path": "/nvme/kv", "capacity": "200GiB"}]

vLLM's processes in front of the engine import this module for its metrics, so it imports the tier
itself only when one is made.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from memlane._base.deadline import seconds_of
from memlane._base.diagnosis import warn
from memlane.errors import InvalidArgument

if TYPE_CHECKING:
    from memlane.tiers import DiskStatistics, Done, Hold, Ticket

_log = logging.getLogger("vllm.memlane")  # formatted and filtered as vLLM's

_KEYS = ("path", "capacity", "namespace", "policy", "timeout", "direct", "opener")
_XXHASH_KEY = 20  # bytes: 16 of the hash, 4 of the group

# Parts of vLLM's configuration that say nothing about the bytes of a block.
_NOT_OF_BLOCKS = ("engine_id", "extra_config", "enable_kv_cache_events")
_NOT_OF_MODELS = ("max_model_len",)
_NOT_OF_RANKS = (
    "rank",
    "data_parallel_index",
    "data_parallel_size",
    "data_parallel_rank_local",
)

_PREFIX = "vllm:memlane_disk_tier_"
_COUNTERS = {
    "stored": "Blocks that were stored.",
    "loaded": "Blocks that were loaded.",
    "missed": "Loads of blocks that were not there any more.",
    "declined": "Blocks that the policy did not want, or for which there was no room.",
    "evicted": "Blocks that made room for others.",
    "errors": "Reads and writes that the system refused.",
    "corrupt": "Blocks that were not what was stored.",
    "expired": "Blocks that missed their deadline.",
}
_GAUGES = {
    "used": "Bytes of the blocks that are stored.",
    "capacity": "Bytes of blocks that fit.",
    "queue": "Blocks that wait for the disk.",
    "stalled": "1 while the disk does not answer.",
}
_LATENCIES = ("store", "load")
_QUANTILES = ("p50", "p99")


class DiskTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not here
    """`memlane.tiers.DiskTier` behind vLLM's primary tier.

    A block that the policy declines counts as stored, because vLLM has nothing to do about it.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        locality: str | None = None,
        **own: Any,
    ) -> None:
        """Args:
            own: the keys of the tier's configuration: `path` and `capacity`, both required,
                `policy`, `timeout`, `direct` as `memlane.tiers.DiskTier` takes them; `namespace`,
                text for what vLLM does not know of: revision, tenant; `opener`, by default the
                data-parallel index.

        Raises:
            InvalidArgument: a key is unknown, or missing.
            MemlaneError: as `memlane.tiers.DiskTier`.
        """
        from memlane.tiers import DiskTier as Disk

        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        known = ", ".join(_KEYS)
        if unknown := sorted(set(own) - set(_KEYS)):
            raise InvalidArgument(f"a DiskTier has no key {unknown[0]!r}; it has {known}")
        if missing := [name for name in ("path", "capacity") if name not in own]:
            raise InvalidArgument(f"a DiskTier needs the key {missing[0]!r}; it has {known}")
        self.locality = Locality(locality) if locality is not None else None
        config = offloading_spec.config
        own.setdefault("opener", str(config.parallel.data_parallel_index))
        own["namespace"] = namespace_of(config, own.get("namespace", ""))
        path = own.pop("path")
        self._tier = Disk(path, primary_kv_view, own.pop("capacity"), **own)
        begun = self._tier.statistics()
        way = "O_DIRECT" if self._tier.is_direct else "page cache"
        _log.info(
            "a disk tier in %s, opener %s: %d blocks of %d bytes, %s by %s; %d are there already",
            *(path, own["opener"], begun.slots, self._block_size_bytes),
            *(way, begun.engine, begun.recovered),
        )
        self._timeout = seconds_of(own.get("timeout", 5.0))
        self._jobs: dict[Ticket, tuple[int, list[bytes], bool]] = {}
        self._held: dict[bytes, Hold] = {}  # found, and not asked for yet
        self._expired: dict[bytes, float] = {}  # until when they are misses
        self._reported: DiskStatistics | None = None
        self._has_warned = False

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if self._is_expired(key):
            return LookupResult.MISS
        if key in self._held:
            return LookupResult.HIT
        held = self._tier.hold([key])
        if not held.there[0]:
            return LookupResult.MISS
        self._held[key] = held
        return LookupResult.HIT

    def _is_expired(self, key: bytes) -> bool:
        """Whether its load was too late just now: whoever asks at once would wait once more."""
        until = self._expired.get(key)
        if until is None:
            return False
        if until > time.monotonic():
            return True
        del self._expired[key]
        return False

    def submit_store(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._warn_of_hashes(keys)
        ticket = self._tier.store(keys, job_metadata.chunk_ids)
        self._jobs[ticket] = (job_metadata.job_id, keys, False)

    def submit_load(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        ticket = self._tier.load(keys, job_metadata.chunk_ids)
        self._jobs[ticket] = (job_metadata.job_id, keys, True)
        for key in keys:  # the load holds them from here on
            self._release(key)

    def _release(self, key: bytes) -> None:
        if (held := self._held.pop(key, None)) is not None:
            held.release()

    def _warn_of_hashes(self, keys: Sequence[bytes]) -> None:
        if self._has_warned or not keys:
            return
        self._has_warned = True
        if len(keys[0]) == _XXHASH_KEY and not os.environ.get("PYTHONHASHSEED"):
            warn(
                "vLLM hashes blocks by xxhash with a seed of its own: nothing will be found after "
                "a restart; set PYTHONHASHSEED, or use sha256"
            )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(done) for done in self._tier.poll()]

    def _result(self, done: Done) -> JobResult:
        job_id, keys, is_load = self._jobs.pop(done.ticket)
        if not is_load:  # a declined block is no failure
            return JobResult(job_id, done.error is None, None, done.seconds, done.bytes)
        loaded = [keys[at] for at in np.flatnonzero(done.ok).tolist()]
        if done.error is not None:
            now = time.monotonic()
            self._expired = {key: until for key, until in self._expired.items() if until > now}
            failed = [key for key, ok in zip(keys, done.ok, strict=True) if not ok]
            there = self._tier.has(failed)  # a corrupt block is not, and may be stored again
            late = [key for key, has in zip(failed, there, strict=True) if has is not False]
            self._expired |= dict.fromkeys(late, now + self._timeout)
        return JobResult(job_id, bool(done.ok.all()), loaded, done.seconds, done.bytes)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Each block is offered once, when it is computed. To offer those again that vLLM has in
        memory changes the prefix hits by -0.2 to +0.6 points on two traces of Mooncake."""
        return RequestOffloadingContext()

    def touch(self, keys: Collection[bytes], req_context: Any) -> None:
        self._tier.touch(list(keys))

    def on_schedule_end(self, context: Any) -> None:
        for key in list(self._held):  # those that found no room in the primary tier
            self._release(key)

    def drain_jobs(self) -> None:
        while not self._tier.drain(60.0):
            warn("a disk tier has waited 60 s for its disk; vLLM waits for it to reset its cache")

    def shutdown(self) -> None:
        """Raises:
        TimedOut: the disk does not answer; vLLM then keeps the memory that it may write to.
        """
        self.on_schedule_end(None)
        self._tier.close()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            f"{_PREFIX}{name}": OffloadingCounterMetadata(documentation=text)
            for name, text in _COUNTERS.items()
        }
        for name, text in _GAUGES.items():
            made[f"{_PREFIX}{name}"] = OffloadingGaugeMetadata(documentation=text)
        for what in _LATENCIES:
            for quantile in _QUANTILES:
                made[f"{_PREFIX}{what}_seconds_{quantile}"] = OffloadingGaugeMetadata(
                    documentation=f"Seconds until a block is done, {what}, {quantile}."
                )
        return made

    def get_stats(self) -> OffloadingConnectorStats | None:
        now, before = self._tier.statistics(), self._reported
        if now == before:
            return None
        stats = OffloadingConnectorStats()
        for name in _COUNTERS:
            more = getattr(now, name) - (getattr(before, name) if before else 0)
            stats.increase_counter(f"{_PREFIX}{name}", more)
        for name in _GAUGES:
            stats.set_gauge(f"{_PREFIX}{name}", getattr(now, name))
        for what in _LATENCIES:
            for quantile in _QUANTILES:
                seconds = getattr(getattr(now, f"{what}_latency"), quantile)
                stats.set_gauge(f"{_PREFIX}{what}_seconds_{quantile}", seconds)
        self._reported = now
        return stats


def namespace_of(config: Any, own: str) -> bytes:
    """What decides which bytes a block of that configuration has, and the user's own text."""
    facts = dataclasses.asdict(config)
    for part, names in (
        (facts, _NOT_OF_BLOCKS),
        (facts["model"], _NOT_OF_MODELS),
        (facts["parallel"], _NOT_OF_RANKS),
    ):
        for name in names:
            part.pop(name, None)
    return json.dumps([facts, own], sort_keys=True).encode()


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
            self._pool.set_pinned([key for key, is_free in new.items() if is_free], False)
        return self._pool

    def remove(self, key: bytes) -> None:
        pool = self._filled()
        if self._chunks.pop(key).ref_cnt != 0:
            pool.set_pinned([key], False)
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
        from memlane import _native

        self._pool = _native.BlockPool(max(1, self.cache_capacity), "tuned")  # vLLM allows 0
        self._chunks.clear()
        self._new.clear()

    def mark_evictable(self, key: bytes) -> None:
        self._filled().set_pinned([key], False)

    def mark_non_evictable(self, key: bytes) -> None:
        self._filled().set_pinned([key], True)
