"""vLLM's scheduler with memlane's tier and policy; `running.run` runs each function."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import (
    CPUPrimaryTierOffloadingManager,
    TieringOffloadingManager,
)

from memlane import Closed, InvalidArgument, TierInUse, TimedOut
from memlane.engines.vllm.tiers import TunedPolicy
from memlane.tiers.conformance import content
from tests.support import PATIENCE, disk_tiers, until

HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING
RETRY = LookupResult.RETRY
Where = Path | dict[str, Any]  # the folder of a disk tier, or the configuration of any
MODULE = "memlane.engines.vllm.tiers"
ROW = 4096
STEP = ScheduleEndContext(new_req_ids=[], preempted_req_ids=())
KEYS = "path, capacity, namespace, policy, timeout, direct, opener"
names = itertools.count()


def key(number: int, size: int = 32) -> bytes:
    """As vLLM makes them of sha256."""
    return make_offload_key(number.to_bytes(size, "big"), 0)


def capacity_of(blocks: int) -> int:
    """Bytes on disk for so many blocks."""
    return disk_tiers.capacity_of(blocks, ROW)


CONFIG = OffloadingConfig(
    groups=(OffloadingGroupConfig(16, ("layer",), 0),),
    worker_kv_bytes_per_block=ROW,
    enable_kv_cache_events=False,
    extra_config={},
    engine_id="engine",
    model=OffloadingModelConfig(name="model", dtype="float16"),
    cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
    parallel=OffloadingParallelConfig(
        rank=0,
        world_size=1,
        tp_size=1,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=False,
    ),
)


def config(**changes: Any) -> Any:
    """CONFIG, with other fields of its parts."""
    parts: dict[str, Any] = {}
    for part in ("model", "parallel", "cache"):
        old = getattr(CONFIG, part)
        own = {name: value for name, value in changes.items() if hasattr(old, name)}
        parts[part] = dataclasses.replace(old, **own)
    rest = {name: value for name, value in changes.items() if hasattr(CONFIG, name)}
    return dataclasses.replace(CONFIG, **parts, **rest)


def keys_of(where: Where) -> dict[str, Any]:
    if isinstance(where, dict):
        return where
    size = capacity_of(100)
    return {"type": "DiskTier", "path": str(where), "capacity": size, "timeout": PATIENCE}


def made(view: memoryview, spec: Any = CONFIG, **own: Any) -> Any:
    """A tier, as vLLM makes it of its configuration."""
    configured = {"module_path": MODULE, **own}
    return SecondaryTierFactory.create_secondary_tier(
        configured, view, SimpleNamespace(config=spec)
    )


@contextmanager
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as there:
        yield Path(there)


class Alone:
    """A tier without vLLM's manager, over rows with the contents of their numbers."""

    def __init__(self, where: Where, spec: Any = CONFIG, rows: int = 8, **own: Any) -> None:
        self.rows = np.stack([content(number, ROW) for number in range(rows)])
        self.view = memoryview(self.rows)
        self.tier = made(self.view, spec, **{**keys_of(where), **own})

    def __enter__(self) -> Alone:
        return self

    def __exit__(self, *_: object) -> None:
        self.tier.shutdown()

    def job(self, numbers: Sequence[int], ids: Sequence[int], is_load: bool, size: int = 32) -> Any:
        return TransferJob(
            job_id=next(names),
            keys=[key(number, size) for number in numbers],
            chunk_ids=np.array(ids, np.int32),
            is_promotion=is_load,
            req_context=ReqContext(req_id="request"),
        )

    def store(self, *numbers: int, size: int = 32) -> Any:
        """The result of storing rows 0 and so on, under these numbers, with their contents."""
        for at, number in enumerate(numbers):
            self.rows[at] = content(number, ROW)
        job = self.job(numbers, range(len(numbers)), False, size)
        self.tier.submit_store(job)
        return self.result(job)

    def load(self, *numbers: int) -> Any:
        """The result of loading them into rows 0 and so on, whose contents are compared."""
        self.rows[:] = 0
        job = self.job(numbers, range(len(numbers)), True)
        self.tier.submit_load(job)
        result = self.result(job)
        for at, number in enumerate(numbers):
            if key(number) in result.successful_keys:
                np.testing.assert_array_equal(self.rows[at], content(number, ROW))
        return result

    def result(self, job: Any) -> Any:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            for result in self.tier.get_finished_jobs():
                assert result.job_id == job.job_id
                return result
            time.sleep(0.001)
        raise TimeoutError(f"job {job.job_id} was not reported")

    def there(self, *numbers: int) -> list[int]:
        """Those that `lookup` finds, in as many steps as it takes; nothing stays held."""
        context = ReqContext(req_id=str(next(names)))
        end = time.monotonic() + PATIENCE
        while True:
            found = {number: self.tier.lookup(key(number), context) for number in numbers}
            self.tier.on_schedule_end(STEP)
            if RETRY not in found.values():
                self.tier.on_request_finished(context)
                return [number for number, result in found.items() if result is HIT]
            assert time.monotonic() < end
            time.sleep(0.001)


class Engine:
    """vLLM's manager with memlane's policy and tiers, and what a scheduler does with it."""

    def __init__(
        self, where: Where, *others: Where, rows: int = 4, spec: Any = CONFIG, **own: Any
    ) -> None:
        self.rows = np.zeros((rows, ROW), np.uint8)
        region: Any = SimpleNamespace(
            create_kv_memoryview=lambda: memoryview(self.rows), cleanup=lambda: None
        )
        self.primary = CPUPrimaryTierOffloadingManager(
            num_chunks=rows,
            mmap_region=region,
            cache_policy="TunedPolicy",
            cache_policy_module_path=MODULE,
        )
        view = self.primary.get_kv_memoryview()
        self.tier = made(view, spec, **{**keys_of(where), **own})
        tiers = [self.tier, *(made(view, **keys_of(each)) for each in others)]
        self.manager = TieringOffloadingManager(self.primary, tiers)

    @contextmanager
    def request(self) -> Iterator[Any]:
        context = ReqContext(req_id=str(next(names)))
        assert self.manager.on_new_request(context).policy == OffloadPolicy.CHUNK_LEVEL
        yield context
        self.manager.on_request_finished(context)
        self.settle()

    def settle(self) -> None:
        """Steps until nothing is under way."""
        end = time.monotonic() + PATIENCE
        self.manager.on_schedule_end(STEP)
        while self.manager.has_pending_work():
            assert time.monotonic() < end
            time.sleep(0.001)
            self.manager.on_schedule_end(STEP)

    def store(self, *numbers: int) -> None:
        """Computes these blocks."""
        by_key = {key(number): number for number in numbers}
        with self.request() as context:
            output = self.manager.prepare_store(list(by_key), context)
            assert output is not None
            for new, chunk in zip(output.keys_to_store, output.store_spec.chunk_ids, strict=True):
                self.rows[chunk] = content(by_key[new], ROW)
            if output.keys_to_store:
                self.manager.complete_store(output.keys_to_store, context)

    def load(self, *numbers: int) -> list[int]:
        """Those that a request for these blocks gets, with the right bytes, in as many steps as it
        takes."""
        with self.request() as context:
            end = time.monotonic() + PATIENCE
            while True:
                results = {at: self.manager.lookup(key(at), context) for at in numbers}
                if not {RETRY, PENDING} & set(results.values()):
                    break
                assert time.monotonic() < end
                self.settle()
            found = [at for at, result in results.items() if result is HIT]
            keys = [key(number) for number in found]
            chunks = self.manager.prepare_load(keys, context).chunk_ids
            for number, chunk in zip(found, chunks, strict=True):
                np.testing.assert_array_equal(self.rows[chunk], content(number, ROW))
            self.manager.complete_load(keys, context)
        return found

    def in_memory(self, *numbers: int) -> list[int]:
        context = ReqContext(req_id="request")
        return [at for at in numbers if self.primary.lookup(key(at), context) is HIT]


@contextmanager
def logged() -> Iterator[list[str]]:
    """The lines of memlane."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memlane").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("memlane").removeHandler(handler)


@contextmanager
def expiring(tier: Any) -> Iterator[None]:
    """Loads that are reported meanwhile have missed their deadline; a real disk may be in time for
    any."""
    poll = tier._tier.poll

    def late() -> list[Any]:
        why = "the deadline has passed"
        return [dataclasses.replace(each, ok=np.zeros_like(each.ok), error=why) for each in poll()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tier._tier, "poll", late)
        yield


def corrupt(path: Path, number: int) -> None:
    """Flips a bit of that block on disk."""
    data = path / "0.data"
    at = data.read_bytes().index(content(number, ROW).tobytes())
    with data.open("r+b") as file:
        file.seek(at + 1000)
        file.write(bytes([content(number, ROW)[1000] ^ 1]))


# The tier alone ------------------------------------------------------------------------------


def keys_of_its_configuration() -> None:
    """All are accepted; an unknown or a missing one is named, with those that there are."""
    rows = memoryview(np.zeros((2, ROW), np.uint8))
    with folder() as path:
        good = {"path": str(path), "capacity": "1MiB"}
        for own, says in (
            ({**good, "capcity": 1}, f"a DiskTier has no key 'capcity'; it has {KEYS}"),
            ({"capacity": "1MiB"}, f"a DiskTier needs the key 'path'; it has {KEYS}"),
            ({"path": str(path)}, f"a DiskTier needs the key 'capacity'; it has {KEYS}"),
        ):
            with pytest.raises(InvalidArgument, match=re.escape(says)):
                made(rows, type="DiskTier", **own)
        assert list(path.iterdir()) == []
        more = {"policy": "lru", "timeout": 1.5, "direct": False, "opener": "a", "namespace": "n"}
        tier = made(rows, type="DiskTier", **good, **more, locality="LOCAL")
        assert (tier.tier_type, tier.medium) == ("DiskTier", Medium.STORAGE)
        assert tier.locality is Locality.LOCAL
        assert {file.name for file in path.iterdir()} == {"a.data", "a.headers", "a.uses"}
        tier.shutdown()
        with pytest.raises(ValueError, match="Locality"):
            made(rows, type="DiskTier", **good, locality="here")


def store_and_load() -> None:
    """Equal bytes, one result a job, and a key that is not there fails alone."""
    with folder() as path, Alone(path) as alone:
        stored = alone.store(0, 1, 2)
        assert (stored.success, stored.transfer_bytes) == (True, 3 * ROW)
        assert alone.there(0, 1, 2, 3) == [0, 1, 2]
        loaded = alone.load(2, 0)
        assert (loaded.success, loaded.transfer_bytes) == (True, 2 * ROW)
        assert loaded.transfer_time > 0
        partly = alone.load(1, 3)
        assert (partly.success, list(partly.successful_keys)) == (False, [key(1)])
        assert list(alone.tier.get_finished_jobs()) == []


def a_corrupt_block() -> None:
    """The others of its job succeed; it is a miss from then on, and the log has one line."""
    with folder() as path, Alone(path) as alone, logged() as lines:
        alone.store(0, 1, 2)
        corrupt(path, 1)
        result = alone.load(0, 1, 2)
        assert (result.success, list(result.successful_keys)) == (False, [key(0), key(2)])
        assert alone.there(0, 1, 2) == [0, 2]
        corrupt(path, 2)
        assert list(alone.load(2).successful_keys) == []
        assert len(lines) == 1
        assert "blocks that are not what was stored" in lines[0]


def a_declined_block() -> None:
    """Is no failure: vLLM could do nothing about it."""
    with folder() as path, Alone(path, capacity=capacity_of(1), policy="lru") as alone:
        alone.store(0)
        assert alone.tier.lookup(key(0), None) is HIT  # held: there is no room
        assert alone.store(1).success
        alone.tier.on_schedule_end(STEP)
        assert alone.there(0, 1) == [0]


def namespaces() -> None:
    """Settings that determine the bytes of a block separate namespaces, and nothing else does."""
    with folder() as path:
        with Alone(path, namespace="main") as alone:
            alone.store(0)
        for changes, own, found in (
            ({}, "main", [0]),
            ({"name": "another"}, "main", []),
            ({"dtype": "float8"}, "main", []),
            ({"tp_size": 2, "world_size": 2}, "main", []),
            ({"tokens_per_hash": 32}, "main", []),
            ({}, "another", []),
            ({}, None, []),
            ({"data_parallel_size": 2, "data_parallel_rank_local": 0}, "main", [0]),
            ({"engine_id": "another", "enable_kv_cache_events": True}, "main", [0]),
            ({"extra_config": {"cpu_bytes_to_use": 7}}, "main", [0]),
        ):
            text = {} if own is None else {"namespace": own}
            with Alone(path, config(**changes), **text) as alone:
                assert alone.there(0) == found, (changes, own)
        if os.environ["TEST_RELEASE"] == "0.33":
            with Alone(path, config(max_model_len=77), namespace="main") as alone:
                assert alone.there(0) == [0]


def openers() -> None:
    """By default the data-parallel index: each has its own files, and one process at a time."""
    with folder() as path, Alone(path) as first:
        with Alone(path, config(data_parallel_index=1, data_parallel_size=2)) as second:
            assert {file.stem for file in path.glob("*.data")} == {"0", "1"}
            first.store(0)
            second.store(1)
            assert (first.there(0, 1), second.there(0, 1)) == ([0], [1])
        with pytest.raises(TierInUse, match=f"in use by process {os.getpid()}; give another"):
            Alone(path)
        with Alone(path, opener="mine"):
            assert (path / "mine.data").exists()
    with folder() as path, Alone(path, config(data_parallel_index=3, data_parallel_size=4)):
        assert (path / "3.data").exists()


def hashes_that_do_not_last() -> None:
    """One warning, of xxhash with a random seed alone."""
    for size, seed, count in ((16, None, 1), (16, "0", 0), (32, None, 0)):
        with pytest.MonkeyPatch.context() as patch, folder() as path, logged() as lines:
            patch.delenv("PYTHONHASHSEED", raising=False)
            if seed is not None:
                patch.setenv("PYTHONHASHSEED", seed)
            with Alone(path) as alone:
                alone.store(0, 1, size=size)
                alone.store(2, size=size)
            assert len(lines) == count, (size, seed)
            assert all("set PYTHONHASHSEED" in line for line in lines)


def metrics() -> None:
    """The sent metrics are those declared, counters as differences, and nothing if nothing
    changed."""
    with folder() as path, Alone(path) as alone:
        declared = type(alone.tier).build_metric_definitions({})
        alone.store(0, 1)
        first = alone.tier.get_stats()
        assert set(first.reduce()) == set(declared)
        assert first.reduce()["vllm:memlane_disk_tier_stored"] == 2
        assert first.reduce()["vllm:memlane_disk_tier_used"] == 2 * ROW
        assert alone.tier.get_stats() is None
        alone.load(0)
        assert alone.there(0, 9) == [0]
        second = alone.tier.get_stats().reduce()
        asked, found = (second[f"vllm:memlane_disk_tier_{one}"] for one in ("lookups", "found"))
        assert asked > found > 0
        assert second["vllm:memlane_disk_tier_stored"] == 0
        assert second["vllm:memlane_disk_tier_loaded"] == 1
        kinds = {name: type(each).__name__ for name, each in declared.items()}
        for name, kind in first.data["types"].items():
            assert kinds[name] == f"Offloading{kind.title()}Metadata"


def a_load_that_expires() -> None:
    """Its key is a miss for as long as the timeout, so that nobody waits for it once more."""
    timeout = 0.5
    with folder() as path, Alone(path, timeout=timeout) as alone:
        alone.store(0, 1)
        begun = time.monotonic()
        with expiring(alone.tier):
            result = alone.load(0)
        assert (result.success, list(result.successful_keys)) == (False, [])
        is_missed = alone.there(0, 1) == [1]
        assert is_missed or time.monotonic() - begun > timeout
        until(lambda: alone.there(0))
        assert time.monotonic() - begun >= timeout
        assert alone.load(0).success


def holds() -> None:
    """A block that was found is not evicted before it is loaded, or the step ends."""
    with folder() as path, Alone(path, capacity=capacity_of(4), policy="lru") as alone:
        alone.store(0, 1, 2, 3)
        assert alone.tier.lookup(key(0), None) is HIT
        assert alone.tier.lookup(key(0), None) is HIT  # asked twice, held once
        alone.store(4, 5, 6, 7)
        alone.store(8, 9, 10)
        assert alone.load(0).success
        alone.store(11, 12, 13, 14)
        assert alone.there(0, 11, 12, 13, 14) == [11, 12, 13, 14]

        assert alone.tier.lookup(key(11), None) is HIT
        alone.tier.on_schedule_end(STEP)
        alone.store(15, 16, 17, 18)
        assert alone.there(11, 15, 16, 17, 18) == [15, 16, 17, 18]


def draining() -> None:
    """Every result is there afterwards; a disk that takes long is waited for, with a line."""
    with folder() as path, Alone(path) as alone, logged() as lines:
        jobs = [alone.job([number], [number], False) for number in range(8)]
        for job in jobs:
            alone.tier.submit_store(job)
        alone.tier.drain_jobs()
        results = {result.job_id for result in alone.tier.get_finished_jobs()}
        assert results == {job.job_id for job in jobs}
        assert lines == []
        answers = iter([False, True])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(alone.tier._tier, "drain", lambda _: next(answers))
            alone.tier.drain_jobs()
        assert list(answers) == []
        assert len(lines) == 1


def the_end() -> None:
    """Nothing keeps the memory, even what was held; while the disk is silent everything does."""
    with folder() as path:
        alone = Alone(path)
        alone.store(0)
        assert alone.tier.lookup(key(0), None) is HIT
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(alone.tier._tier, "drain", lambda _: False)
            with pytest.raises(TimedOut, match="rows must not be freed"):
                alone.tier.shutdown()
        alone.tier.shutdown()
        alone.view.release()
        with pytest.raises(Closed):
            alone.tier.lookup(key(0), None)
        alone.tier.shutdown()
        with Alone(path) as again:  # the files are free
            assert again.there(0) == [0]


# Behind vLLM's manager -----------------------------------------------------------------------


def evicted_and_promoted() -> None:
    """Blocks that memory has evicted come back from the disk, also in another process."""
    with folder() as path:
        engine = Engine(path)
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        assert engine.in_memory(*range(8)) == [4, 5, 6, 7]
        assert engine.load(0, 1, 2, 3) == [0, 1, 2, 3]
        assert engine.load(6, 7, 8) == [6, 7]
        stats = engine.manager.get_stats().reduce()
        assert stats["vllm:memlane_disk_tier_stored"] == 8
        assert stats["vllm:memlane_disk_tier_loaded"] == 6
        engine.manager.shutdown()  # releases the memory
        again = Engine(path)
        assert again.load(*range(4)) == [0, 1, 2, 3]
        again.manager.shutdown()


def corrupt_and_promoted() -> None:
    """That block is computed again; its request and the engine go on."""
    with folder() as path, logged() as lines:
        engine = Engine(path)
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        corrupt(path, 1)
        assert engine.load(0, 1, 2, 3) == [0, 2, 3]
        assert len(lines) == 1
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        assert engine.load(0, 1, 2, 3) == [0, 1, 2, 3]
        engine.manager.shutdown()


def too_late_and_promoted() -> None:
    """A load that expires is computed again, and the request does not wait for it twice."""
    with folder() as path:
        engine = Engine(path, timeout=PATIENCE)
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        with expiring(engine.tier):
            assert engine.load(0, 1, 2, 3) == []
        assert engine.load(0, 1, 2, 3) == []
        engine.manager.shutdown()


def more_than_fits() -> None:
    """Blocks come and go in memory and on disk; what is found is right."""
    with folder() as path:
        engine = Engine(path, rows=8, capacity=capacity_of(24))
        chosen, found = random.Random(7), 0
        for _ in range(200):
            start = 4 * chosen.randrange(10)
            numbers = range(start, start + 4)
            found += len(engine.load(*numbers))
            engine.store(*numbers)
        stats = engine.manager.get_stats().reduce()
        assert 0 < stats["vllm:memlane_disk_tier_loaded"] < found < 800
        assert stats["vllm:memlane_disk_tier_evicted"] > 0
        assert stats["vllm:memlane_disk_tier_used"] <= 24 * ROW
        engine.manager.shutdown()


def reset() -> None:
    """Clears memory and the disk: blocks of before are misses, also after a restart."""
    with folder() as path:
        engine = Engine(path)
        engine.store(0, 1)
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.in_memory(0, 1) == []
        assert engine.load(0, 1) == []
        engine.store(2)
        assert engine.load(0, 2) == [2]
        engine.manager.shutdown()
        engine = Engine(path)
        assert engine.load(0, 1) == []
        engine.manager.shutdown()


def a_reset_that_keeps() -> None:
    """Clears memory and not the disk, also while a promotion is queued."""
    with folder() as path:
        engine = Engine(path, on_reset="keep")
        engine.store(0, 1)
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.in_memory(0, 1) == []
        assert engine.manager.lookup(key(0), ReqContext(req_id="queued")) is PENDING
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.load(0, 1) == [0, 1]
        engine.manager.shutdown()


# What routers are told -----------------------------------------------------------------------


def events(of: Any) -> list[tuple[bool, list[int]]]:
    """The events since the last call, of a tier or of an engine's: whether blocks were removed, and
    which."""
    tier = of.tier if isinstance(of, Engine) else of
    taken = [*(of.manager if isinstance(of, Engine) else of).take_events()]
    for event in taken:
        assert (event.medium, event.ownership) == (Medium.STORAGE, tier.tier_type)
        assert event.locality is tier.locality
    return [(each.removed, sorted(map(number_of, each.keys))) for each in taken]


def number_of(name: bytes) -> int:
    return int.from_bytes(name[:32], "big")


EVENTS = config(enable_kv_cache_events=True)


def events_are_off_unless_vllm_wants_them() -> None:
    with folder() as path, Alone(path) as engine:
        assert engine.store(0).success
        assert events(engine.tier) == []


def events_of_stores_and_evictions() -> None:
    """Nothing is reported that was stored and evicted since, nor what the policy declines."""
    with folder() as path, Alone(path, EVENTS, capacity=capacity_of(3), policy="lru") as engine:
        assert engine.store(0, 1).success
        assert events(engine.tier) == [(False, [0, 1])]
        assert engine.store(0, 1).success  # again
        assert events(engine.tier) == []
        for number in range(2, 9):
            assert engine.store(number).success
        (_, gone), (_, new) = events(engine.tier)
        assert gone == [0, 1]
        assert new == [6, 7, 8] == engine.there(*range(9))


def events_of_declined_blocks() -> None:
    with folder() as path, Alone(path, EVENTS, capacity=capacity_of(1)) as engine:
        engine.store(0)
        with engine.tier._tier.hold([key(0)]):
            engine.store(1)
        assert events(engine.tier) == [(False, [0])]
        assert len(engine.tier._inventory._keys) == 1  # and nothing is kept of it


def events_of_blocks_that_are_lost() -> None:
    """Found corrupt by a load, forgotten, or all cleared by somebody who has the tier."""
    with folder() as path, Alone(path, EVENTS) as engine:
        engine.store(0, 1, 2, 3)
        assert events(engine.tier) == [(False, [0, 1, 2, 3])]
        corrupt(path, 1)
        engine.load(0, 1)
        assert events(engine.tier) == [(True, [1])]
        engine.tier._tier.forget([key(2)])
        assert events(engine.tier) == [(True, [2])]
        engine.tier._tier.clear()
        assert events(engine.tier) == [(True, [0, 3])]
        engine.store(1)
        assert events(engine.tier) == [(False, [1])]


def events_after_a_restart() -> None:
    """Blocks that are there are reported at once; those stored without events, once they are
    found."""
    with folder() as path:
        with Alone(path) as engine:
            engine.store(0, 1)
        with Alone(path, EVENTS) as engine:
            assert engine.there(1, 2) == [1]
            assert events(engine.tier) == [(False, [1])]
            engine.store(2, 3)
            engine.tier._tier.forget([key(2)])
        with Alone(path, EVENTS) as engine:
            assert events(engine.tier) == [(False, [1, 3])]
            engine.tier._tier.forget([key(0), key(1)])
            assert events(engine.tier) == [(True, [1])]


def several_disks() -> None:
    """A list of folders: blocks and events are of all of them, also after a restart without one."""
    with folder() as path:
        folders, numbers = [str(path / name) for name in "abc"], range(48)  # each has some
        with Alone(path, EVENTS, rows=48, path=folders) as engine:
            engine.store(*numbers)
            assert sorted(n for _, new in events(engine.tier) for n in new) == [*numbers]
            assert engine.load(*numbers).success
            array = engine.tier._tier
            parts = array.split([key(number) for number in numbers])
            gone = {
                number_of(k)
                for disk, own, _ in parts
                for k in own
                if disk is array.disks[folders[2]]
            }
            assert gone
        left = [number for number in numbers if number not in gone]
        with Alone(path, EVENTS, rows=48, path=folders[1::-1]) as engine:
            assert sorted(n for _, new in events(engine.tier) for n in new) == left
            assert engine.there(*numbers) == left
            assert engine.load(*left).success


def events_of_a_reset() -> None:
    """Everything is gone; or, for routers that have heard that all is cleared, here again."""
    with folder() as path, Alone(path, EVENTS) as engine:
        engine.store(0, 1)
        events(engine.tier)
        engine.store(2)
        engine.tier.drain_jobs()
        assert events(engine.tier) == [(True, [0, 1])]
        engine.store(1)
        assert events(engine.tier) == [(False, [1])]
    with folder() as path, Alone(path, EVENTS, on_reset="keep") as engine:
        engine.store(0, 1)
        events(engine.tier)
        engine.tier.drain_jobs()
        assert events(engine.tier) == [(False, [0, 1])]


def events_that_nobody_takes() -> None:
    """Need no more memory than the blocks that are there."""
    with folder() as path, Alone(path, EVENTS, capacity=capacity_of(3), policy="lru") as engine:
        for number in range(200):
            engine.store(number)
        inventory = engine.tier._inventory
        assert len(inventory._keys) == 3
        assert len(inventory._changed) == 3
        assert events(engine.tier) == [(False, [197, 198, 199])]


def events_behind_vllms_manager() -> None:
    """A reset removes what was stored."""
    with folder() as path:
        engine = Engine(path, spec=EVENTS)
        engine.store(0, 1)
        assert events(engine) == [(False, [0, 1])]
        engine.manager.reset_cache()
        assert events(engine) == [(True, [0, 1])]
        engine.manager.shutdown()


# The policy ----------------------------------------------------------------------------------


def with_chunks(count: int, capacity: int | None = None, ref_cnt: int = 0) -> TunedPolicy:
    policy = TunedPolicy(cache_capacity=capacity or count)
    for number in range(count):
        insert(policy, number, ref_cnt)
    return policy


def insert(policy: TunedPolicy, number: int, ref_cnt: int = 0) -> None:
    chunk = ChunkStatus(number)
    chunk.ref_cnt = ref_cnt
    policy.insert(key(number), chunk)


def kept(policy: TunedPolicy, count: int) -> list[int]:
    """Those that it has, each with its own chunk."""
    chunks = [policy.get(key(number)) for number in range(count)]
    assert all(chunk is None or chunk.chunk_id == at for at, chunk in enumerate(chunks))
    return [number for number, chunk in enumerate(chunks) if chunk is not None]


def evicted(policy: TunedPolicy, count: int, protected: Sequence[int] = ()) -> list[int] | None:
    out = policy.evict(count, {key(number) for number in protected})
    assert out is None or all(each == key(chunk.chunk_id) for each, chunk in out)
    return None if out is None else sorted(chunk.chunk_id for _, chunk in out)


def evicts_all_or_none() -> None:
    """Exactly as many as asked for, or nothing, and never what is protected."""
    policy = with_chunks(4)
    assert evicted(policy, 2, protected=[1, 2, 3]) is None
    assert evicted(policy, 5) is None
    assert kept(policy, 4) == [0, 1, 2, 3]
    assert evicted(policy, 0) == []
    assert evicted(policy, 1, protected=[1, 2, 3]) == [0]
    assert kept(policy, 4) == [1, 2, 3]
    assert evicted(policy, 3, protected=[99]) == [1, 2, 3]
    assert kept(policy, 4) == []
    assert evicted(policy, 1) is None
    assert evicted(with_chunks(0), 1) is None  # vLLM allows it


def the_end_goes_before_the_start() -> None:
    """The end goes first among blocks that are stored together; of others the older ones do."""
    policy = TunedPolicy(cache_capacity=6)
    for numbers in ((0, 1, 2), (3, 4, 5)):
        for number in numbers:
            insert(policy, number, ref_cnt=-1)
        for number in numbers:
            policy.mark_evictable(key(number))
    assert [evicted(policy, 1) for _ in range(6)] == [[2], [1], [0], [5], [4], [3]]


def pinned_chunks_stay() -> None:
    """From `mark_non_evictable`, or an insertion that is not ready, until `mark_evictable`."""
    policy = with_chunks(4)
    policy.mark_non_evictable(key(2))
    assert evicted(policy, 4) is None
    assert evicted(policy, 3) == [0, 1, 3]
    policy.mark_evictable(key(2))
    assert evicted(policy, 1) == [2]
    insert(policy, 0, ref_cnt=-1)
    assert evicted(policy, 1) is None
    policy.mark_evictable(key(0))
    assert evicted(policy, 1) == [0]


def removed_and_cleared() -> None:
    """A failed store leaves its place, and `clear` that of every chunk, pinned or not."""
    policy = with_chunks(4, ref_cnt=-1)
    policy.remove(key(1))
    assert kept(policy, 4) == [0, 2, 3]
    insert(policy, 1)
    policy.mark_evictable(key(0))
    policy.mark_non_evictable(key(1))
    policy.clear()
    assert kept(policy, 4) == []
    for number in range(4):
        insert(policy, number)
    assert evicted(policy, 4) == [0, 1, 2, 3]


def used_chunks_outlive_others() -> None:
    """Those that requests have found again, though others are newer."""
    policy, context = with_chunks(20), ReqContext(req_id="request")
    for _ in range(3):
        policy.touch([key(0)], context)
        policy.on_request_finished([[key(1), key(2)]], {key(2)}, {key(1)}, context)
    assert evicted(policy, 18) == list(range(2, 20))


def random_traffic() -> None:
    """vLLM's manager for memory, against a list of what is pinned or being written."""
    for seed in range(20):
        chosen = random.Random(seed)
        capacity = chosen.randint(1, 12)
        manager = CPUOffloadingManager(capacity, "TunedPolicy", MODULE)
        ready: set[int] = set()  # what may still be there
        reading: list[tuple[list[int], Any]] = []
        writing: list[tuple[list[int], Any]] = []

        def keys(numbers: Sequence[int]) -> list[bytes]:
            return [key(number) for number in numbers]

        for step in range(400):
            context = ReqContext(req_id=str(step))
            numbers = chosen.sample(range(30), chosen.randint(1, 4))
            what = chosen.randrange(5)
            if what == 0 and writing:
                done, context = writing.pop(chosen.randrange(len(writing)))
                success = chosen.random() < 0.8
                manager.complete_store(keys(done), context, success)
                ready |= set(done) if success else set()
                manager.on_request_finished(context)
            elif what == 1 and reading:
                done, context = reading.pop(chosen.randrange(len(reading)))
                manager.complete_load(keys(done), context)
                manager.on_request_finished(context)
            elif what == 2:
                found = [at for at in numbers if manager.lookup(key(at), context) is HIT]
                manager.prepare_load(keys(found), context)
                reading.append((found, context))
            else:
                output = manager.prepare_store(keys(numbers), context)
                if output is not None:
                    new = [at for at in numbers if key(at) in output.keys_to_store]
                    writing.append((new, context))
                    ready -= {at for at in ready if key(at) in output.evicted_keys}
            busy = {at for numbers, _ in reading for at in numbers}
            states = {at: manager.lookup(key(at), context) for at in range(30)}
            hits = {at for at, state in states.items() if state is HIT}
            pending = {at for at, state in states.items() if state is PENDING}
            assert hits == ready
            assert busy <= hits
            assert pending == {at for numbers, _ in writing for at in numbers}
            assert len(hits) + len(pending) <= capacity


def a_tuned_tier_learns() -> None:
    """From loads and first stores; a look-up that is repeated is no access. Most blocks come once,
    and a tier that stored them all would find nothing."""
    from benchmarks.tiers.replayed import through

    for requests in (100, 400, 1600):  # it takes a while to learn: longer where its thread waits
        trace = [[*range(80), *range(1000 * at, 1000 * at + 120)] for at in range(1, 1 + requests)]
        seen = through("plug-in", trace, "tuned", 100, 0)
        if seen.prefix > 0.4 * 40 and seen.stored < 60:
            return
    raise AssertionError(seen)
