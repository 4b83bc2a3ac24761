"""The parts that memlane's tiers share as vLLM's secondary tiers: the keys of their configuration,
jobs, loads that failed, figures; and what all tiers on servers add.

vLLM's processes in front of the engine import this module for its metrics, so it imports a tier
itself only when one is made.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

import numpy as np
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    RequestOffloadingContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from memlane._base.deadline import seconds_of
from memlane._base.diagnosis import warn
from memlane._importing import fork_waits
from memlane.errors import InvalidArgument, InvalidType, MemlaneError

if TYPE_CHECKING:
    from memlane.tiers import Done, Ticket
    from memlane.tiers.inventory import Inventory

log = logging.getLogger("vllm.memlane")  # formatted and filtered as vLLM's

_GRACE = 1.0  # seconds, at the end, beyond the deadline of whatever is under way
_XXHASH_KEY = 20  # bytes: 16 of the hash, 4 of the group

# Of all tiers on servers.
_COUNTERS = {
    "stored": "Blocks that were stored.",
    "loaded": "Blocks that were loaded.",
    "missed": "Loads of blocks that were not there any more.",
    "errors": "Blocks that the server refused, or did not answer about.",
    "corrupt": "Blocks that were not what was stored.",
    "expired": "Blocks that missed their deadline.",
}
_GAUGES = {
    "queue": "Blocks that wait for the server.",
    "stalled": "1 while the server does not answer, and is left alone.",
}

# Parts of vLLM's configuration that say nothing about the bytes of a block.
_NOT_OF_BLOCKS = ("engine_id", "extra_config", "enable_kv_cache_events")
_NOT_OF_MODELS = ("max_model_len",)
_NOT_OF_RANKS = (
    "rank",
    "data_parallel_index",
    "data_parallel_size",
    "data_parallel_rank_local",
)


def namespace_of(config: Any, own: str) -> bytes:
    """Returns what determines the bytes of a block of that configuration, and the user's own text.

    The release of vLLM is a part of it, because it decides about a layout that has no name."""
    facts = dataclasses.asdict(config)
    for part, names in (
        (facts, _NOT_OF_BLOCKS),
        (facts["model"], _NOT_OF_MODELS),
        (facts["parallel"], _NOT_OF_RANKS),
    ):
        for name in names:
            part.pop(name, None)
    return json.dumps([facts, vllm.__version__, own], sort_keys=True).encode()


class TierManager(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not here
    """A tier of memlane behind vLLM's primary tier.

    Attributes:
        needed, optional: keys of its configuration, beside vLLM's own.
        default_timeout: seconds.
        prefix: of its metrics.
        counters, gauges: what each counts; the names are those of the tier's statistics.
    """

    medium = Medium.STORAGE
    what = "a tier"
    needed: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[tuple[str, ...]] = ()
    default_timeout: ClassVar[float] = 5.0
    default_locality: ClassVar[str | None] = None
    prefix = ""
    counters: ClassVar[Mapping[str, str]] = {}
    gauges: ClassVar[Mapping[str, str]] = {}

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
            own: the keys of the tier's configuration, as its class says; `namespace` is text for
                what vLLM does not know of: revision, tenant. `on_reset`: what becomes of the
                tier's blocks when vLLM resets its caches: "clear", which is the default, or "keep".

        Raises:
            InvalidArgument: a key is unknown, or missing.
            MemlaneError: as the tier's own constructor.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        names = (*self.needed, *self.optional, "on_reset")
        known = ", ".join(names)
        if unknown := sorted(set(own) - set(names)):
            raise InvalidArgument(f"{self.what} has no key {unknown[0]!r}; it has {known}")
        if missing := [name for name in self.needed if name not in own]:
            raise InvalidArgument(f"{self.what} needs the key {missing[0]!r}; it has {known}")
        self._on_reset = own.pop("on_reset", "clear")
        if self._on_reset not in ("clear", "keep"):
            raise InvalidArgument(f"on_reset must be 'clear' or 'keep', not {self._on_reset!r}")
        if locality is None:
            locality = self.default_locality
        self.locality = Locality(locality) if locality is not None else None
        self._timeout = seconds_of(own.setdefault("timeout", self.default_timeout))
        own["namespace"] = namespace_of(offloading_spec.config, own.get("namespace", ""))
        self._jobs: dict[Ticket, tuple[int, list[bytes], bool]] = {}
        self._failed: dict[bytes, float] = {}  # until when they are misses
        self._reported: dict[str, Any] = {}
        self._has_warned = False
        self._tier = self._open(offloading_spec.config, primary_kv_view, own)
        self._stale: set[Ticket] = set()  # jobs that were under way at the last reset
        self._inventory: Inventory | None = None
        if offloading_spec.config.enable_kv_cache_events:
            self._inventory = self._new_inventory()

    def _open(self, config: Any, rows: memoryview, own: dict[str, Any]) -> Any:
        """The tier with these keys, of which the log has heard."""
        raise NotImplementedError

    def _new_inventory(self) -> Inventory:
        """Returns the inventory from which vLLM's events are made; the tier is open."""
        with fork_waits:
            from memlane.tiers.inventory import Inventory

        return Inventory()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        if self._has_failed(key):
            return LookupResult.MISS
        return self._find(key, req_context)

    def _note(self, key: bytes, is_there: bool) -> LookupResult:
        """The result of a look-up, of which vLLM's events tell."""
        if self._inventory is not None:
            self._inventory.found(key, is_there)
        return LookupResult.HIT if is_there else LookupResult.MISS

    def _find(self, key: bytes, req_context: Any) -> LookupResult:
        raise NotImplementedError

    def _has_failed(self, key: bytes) -> bool:
        """Returns whether its load has failed just now, so that asking at once would mean another
        wait."""
        until = self._failed.get(key)
        if until is None:
            return False
        if until > time.monotonic():
            return True
        del self._failed[key]
        return False

    def submit_store(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        self._warn_of_hashes(keys)
        if self._inventory is not None:
            self._inventory.submitted(keys)
        ticket = self._tier.store(keys, job_metadata.chunk_ids)
        self._jobs[ticket] = (job_metadata.job_id, keys, False)

    def submit_load(self, job_metadata: Any) -> None:
        keys = list(job_metadata.keys)
        ticket = self._tier.load(keys, job_metadata.chunk_ids)
        self._jobs[ticket] = (job_metadata.job_id, keys, True)

    def _warn_of_hashes(self, keys: Sequence[bytes]) -> None:
        if self._has_warned or not keys:
            return
        self._has_warned = True
        if len(keys[0]) == _XXHASH_KEY and not os.environ.get("PYTHONHASHSEED"):
            warn(
                "vLLM hashes blocks by xxhash with a seed of its own: no other engine finds them, "
                "and none after a restart; set PYTHONHASHSEED, or use sha256"
            )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [self._result(done) for done in self._tier.poll()]

    def _result(self, done: Done) -> JobResult:
        job_id, keys, is_load = self._jobs.pop(done.ticket)
        there = [keys[at] for at in np.flatnonzero(done.ok).tolist()]
        if done.ticket in self._stale:
            self._stale.remove(done.ticket)
        elif self._inventory is not None:
            self._inventory.reported(keys, done.ok.tolist(), is_load)
        if not is_load:  # a declined block is no failure
            for key in there:
                self._failed.pop(key, None)
            return JobResult(job_id, done.error is None, None, done.seconds, done.bytes)
        if len(there) < len(keys):
            now = time.monotonic()
            self._failed = {key: until for key, until in self._failed.items() if until > now}
            failed = (key for key, ok in zip(keys, done.ok, strict=True) if not ok)
            self._failed |= dict.fromkeys(failed, now + self._timeout)
        return JobResult(job_id, len(there) == len(keys), there, done.seconds, done.bytes)

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Returns events about the tier's keys for routers, if vLLM publishes them: its
        `kv_events_config`. A stored block is one that this engine has stored or found; that it is
        removed is reported once it is known."""
        if self._inventory is None:
            return ()
        return [
            OffloadingEvent(
                keys=keys,
                medium=self.medium,
                removed=not is_stored,
                locality=self.locality,
                ownership=self.tier_type,
                removal_expected=True,
            )
            for keys, is_stored in self._inventory.take()
        ]

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Each block is offered once, when it is computed. To offer those again that vLLM has in
        memory changes the prefix hits by -0.2 to +0.6 points on two traces of Mooncake."""
        return RequestOffloadingContext()

    def drain_jobs(self) -> None:
        while not self._tier.drain(60.0):
            warn("%s has waited 60 s for its blocks; vLLM waits to reset its cache", self.what)
        if self._on_reset == "clear":
            self._reset()
        elif self._inventory is not None:  # vLLM tells routers that all of its blocks are gone
            self._inventory.again()

    def _reset(self) -> None:
        """Blocks of before are not found any more, nor what engines that share the tier store with
        the old weights: nobody else has the epoch."""
        self._failed.clear()
        self._stale = set(self._jobs)
        if self._inventory is not None:
            self._inventory.cleared()
        self._tier.set_epoch(os.urandom(16))
        try:
            self._tier.clear()
        except MemlaneError as error:
            warn("%s could not be emptied, and finds none of its blocks: %s", self.what, error)

    def shutdown(self) -> None:
        """Raises:
        TimedOut: something does not answer; vLLM then keeps the memory that it may write to.
        """
        self._tier.close(self._timeout + _GRACE)
        if self._inventory is not None:
            self._inventory.close(_GRACE)

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {
            f"{cls.prefix}{name}": OffloadingCounterMetadata(documentation=text)
            for name, text in cls.counters.items()
        }
        for name, text in cls.gauges.items():
            made[f"{cls.prefix}{name}"] = OffloadingGaugeMetadata(documentation=text)
        return made

    def get_stats(self) -> OffloadingConnectorStats | None:
        statistics = self._tier.statistics()
        names = (*self.counters, *self.gauges)
        now = {name: self._figure(statistics, name) for name in names}
        before, self._reported = self._reported, now
        if now == before:
            return None
        stats = OffloadingConnectorStats()
        for name in self.counters:
            stats.increase_counter(f"{self.prefix}{name}", now[name] - before.get(name, 0))
        for name in self.gauges:
            stats.set_gauge(f"{self.prefix}{name}", now[name])
        return stats

    def _figure(self, statistics: Any, name: str) -> Any:
        return getattr(statistics, name)


class RemoteTierManager(TierManager):
    """A tier on a server, which several engines share; the server evicts.

    Whether it has a key is asked behind vLLM's back. A request waits for that, but all in all for
    no longer than the timeout, and not at all from when the server has not answered until it does.

    Attributes:
        tier: the name of its class in `memlane.tiers`.
    """

    default_locality: ClassVar[str | None] = "REMOTE"
    tier = ""
    counters = _COUNTERS
    gauges = _GAUGES

    def _open(self, config: Any, rows: memoryview, own: dict[str, Any]) -> Any:
        with fork_waits:
            from memlane import tiers
            from memlane.tiers.tier import Namespace

        self._patience: dict[str, float] = {}  # by request: until when it waits for answers
        (place,) = self.needed
        where = _from_environment(own.pop(place), place)
        options = own.pop("options", {})
        if not isinstance(options, dict):
            raise InvalidType(f"options must be a dictionary, not {type(options).__name__}")
        opened = getattr(tiers, self.tier)(where, rows, **{**options, **own})
        log.info(
            "%s at %s: blocks of %d bytes, namespace %s",
            *(self.what, _without_secrets(where), self._block_size_bytes),
            Namespace(own["namespace"]).id.hex()[:8],
        )
        return opened

    def _find(self, key: bytes, req_context: Any) -> LookupResult:
        (is_there,) = self._tier.has([key])
        if is_there is not None:
            return self._note(key, is_there)
        now = time.monotonic()
        until = self._patience.setdefault(req_context.req_id, now + self._timeout)
        return LookupResult.RETRY if now < until else LookupResult.MISS

    def on_schedule_end(self, context: Any) -> None:
        for req_id in (*context.new_req_ids, *context.preempted_req_ids):
            self._patience.pop(req_id, None)

    def on_request_finished(self, req_context: Any) -> None:
        self._patience.pop(req_context.req_id, None)


def _from_environment(value: Any, key: str) -> Any:
    """`$NAME` is what that variable has, for what must not be in a command line."""
    if not isinstance(value, str) or not value.startswith("$"):
        return value
    if (found := os.environ.get(value[1:])) is None:
        raise InvalidArgument(f"{key} is {value}, and there is no such environment variable")
    return found


def _without_secrets(where: str) -> str:
    """A URL without its user, password and options."""
    if "://" not in where:
        return where
    parts = urlsplit(where)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
