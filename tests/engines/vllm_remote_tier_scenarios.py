"""vLLM's scheduler with memlane's tiers on servers; `running.run` runs each function."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import Locality, Medium, ReqContext, ScheduleEndContext

from memlane import AccessRefused, Closed, InvalidArgument, InvalidType
from memlane.engines.vllm import _tier_manager
from tests.engines.vllm_tier_scenarios import (
    EVENTS,
    HIT,
    MISS,
    RETRY,
    ROW,
    STEP,
    Alone,
    Engine,
    capacity_of,
    config,
    events,
    folder,
    key,
    logged,
    made,
)
from tests.support import PATIENCE, assert_in_time, until
from tests.support.mooncake_servers import MooncakeMaster
from tests.support.redis_servers import RedisServer

REDIS = "url, namespace, timeout, connections, ttl, options"
OBJECTS = "url, namespace, timeout, connections, options"
MOONCAKE = "master, namespace, timeout, connections, segment, metadata, protocol, device, host, log"


@contextmanager
def server(*options: str) -> Iterator[RedisServer]:
    with TemporaryDirectory() as there, RedisServer(Path(there), *options) as running:
        yield running


def on(running: RedisServer, **own: Any) -> dict[str, Any]:
    return {"type": "RedisTier", "url": running.url, "timeout": PATIENCE, **own}


def request(name: str) -> ReqContext:
    return ReqContext(req_id=name)


@contextmanager
def told() -> Iterator[list[str]]:
    """The lines in vLLM's own log."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    _tier_manager.log.addHandler(handler)
    try:
        yield lines
    finally:
        _tier_manager.log.removeHandler(handler)


def asked(tier: Any, number: int, context: ReqContext) -> Any:
    """Returns what `lookup` answers as soon as it is not RETRY, a step each time."""
    end = time.monotonic() + PATIENCE
    while (result := tier.lookup(key(number), context)) is RETRY:
        assert time.monotonic() < end
        tier.on_schedule_end(STEP)
        time.sleep(0.001)
    return result


def overwrite(running: RedisServer, value: bytes) -> None:
    """All values of the server."""
    for name in running.names():
        assert running.call("SET", name, value) == b"+OK\r\n"


# The configuration ---------------------------------------------------------------------------


LIGHT = """
import sys
from tests.engines import scenario
scenario.prepare(sys.argv[1])
from memlane.engines.vllm import tiers
of_servers = (tiers.RedisTier, tiers.ObjectTier, tiers.MooncakeTier, tiers.ReplicaTier)
for each in (tiers.DiskTier, *of_servers):
    assert each.build_metric_definitions({})
print(*sorted({"redis", "obstore", "mooncake", "memlane.tiers"} & set(sys.modules)))
"""


def what_front_ends_import() -> None:
    """For the metrics of all tiers: none of their libraries."""
    command = [sys.executable, "-c", LIGHT, os.environ["TEST_RELEASE"]]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout == "\n"


def keys_of_each_configuration() -> None:
    """An unknown or a missing one is named, with those that there are; nothing is opened."""
    rows = memoryview(np.zeros((2, ROW), np.uint8))
    nobody = "redis://127.0.0.1:1/0"
    for own, says in (
        (
            {"type": "RedisTier", "url": nobody, "capacity": 1},
            f"a RedisTier has no key 'capacity'; it has {REDIS}",
        ),
        ({"type": "RedisTier"}, f"a RedisTier needs the key 'url'; it has {REDIS}"),
        (
            {"type": "ObjectTier", "url": "file:///nowhere", "ttl": 1},
            f"an ObjectTier has no key 'ttl'; it has {OBJECTS}",
        ),
        ({"type": "ObjectTier"}, f"an ObjectTier needs the key 'url'; it has {OBJECTS}"),
        (
            {"type": "MooncakeTier", "url": nobody},
            f"a MooncakeTier has no key 'url'; it has {MOONCAKE}",
        ),
        ({"type": "MooncakeTier"}, f"a MooncakeTier needs the key 'master'; it has {MOONCAKE}"),
        (
            {"type": "RedisTier", "url": "$NO_SUCH_NAME"},
            "url is $NO_SUCH_NAME, and there is no such environment variable",
        ),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(says)):
            made(rows, **own)
    with pytest.raises(InvalidType, match="options must be a dictionary, not str"):
        made(rows, type="RedisTier", url=nobody, options="ssl")
    with server() as running:
        own = on(running, timeout=1.5, connections=1, ttl=60, options={"health_check_interval": 0})
        tier = made(rows, **own)
        assert (tier.medium, tier.locality) == (Medium.STORAGE, Locality.REMOTE)
        tier.shutdown()
        tier = made(rows, **on(running), locality="LOCAL")
        assert tier.locality is Locality.LOCAL
        tier.shutdown()
        with pytest.raises(ValueError, match="Locality"):
            made(rows, **on(running), locality="here")


def secrets() -> None:
    """A password comes from the environment, and stands in no log; a wrong one is refused."""
    rows = memoryview(np.zeros((2, ROW), np.uint8))
    with (
        server("--requirepass", "hunter2") as running,
        pytest.MonkeyPatch.context() as patch,
        told() as lines,
    ):
        url = f"redis://:hunter2@127.0.0.1:{running.port}/0"
        patch.setenv("CACHE", url)
        made(rows, type="RedisTier", url="$CACHE").shutdown()
        made(rows, type="RedisTier", url=f"{url}?socket_keepalive=1").shutdown()
        own = {"type": "RedisTier", "url": url.replace("hunter2", "hunter3")}
        with pytest.raises(AccessRefused) as refused:
            made(rows, **own)
        assert "hunter" not in str(refused.value)
        assert len(lines) == 2
        for line in lines:
            assert line.startswith(f"a RedisTier at redis://127.0.0.1:{running.port}/0: blocks of")
            assert "hunter" not in line


def one_server_for_several_engines() -> None:
    """They find each other's blocks if and only if those have the same bytes."""
    with server() as running, told() as lines:
        where = on(running)
        with Alone(where, namespace="main") as alone:
            alone.store(0)
            for changes, own, found in (
                ({}, "main", [0]),
                ({"name": "another"}, "main", []),
                ({"dtype": "float8"}, "main", []),
                ({"tp_size": 2, "world_size": 2}, "main", []),
                ({"tokens_per_hash": 32}, "main", []),
                ({"kv_cache_layout": "HND"}, "main", []),
                ({}, "another", []),
                ({"data_parallel_index": 1, "data_parallel_size": 2}, "main", [0]),
                ({"engine_id": "another", "extra_config": {"cpu_bytes_to_use": 7}}, "main", [0]),
            ):
                with Alone(where, config(**changes), namespace=own) as other:
                    assert other.there(0) == found, (changes, own)
                    if found:
                        assert other.load(0).success
                assert (lines[-1].rpartition(" ")[2] == lines[0].rpartition(" ")[2]) == bool(found)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(_tier_manager.vllm, "__version__", "0.99")
                with Alone(where, namespace="main") as other:
                    assert other.there(0) == []


LONG_LEASE = "-default_kv_lease_ttl=60000"
"""In ms. With half a second a slow machine may read too late, which is a miss."""


# The tier alone ------------------------------------------------------------------------------


def _stores_and_loads(where: dict[str, Any], prefix: str) -> None:
    """Equal bytes, one result a job, a key that is not there fails alone; figures as declared."""
    with Alone(where) as alone:
        declared = type(alone.tier).build_metric_definitions({})
        stored = alone.store(0, 1, 2)
        assert (stored.success, stored.transfer_bytes) == (True, 3 * ROW)
        assert alone.there(0, 1, 2, 3) == [0, 1, 2]
        loaded = alone.load(2, 0)
        assert (loaded.success, loaded.transfer_bytes) == (True, 2 * ROW)
        partly = alone.load(1, 3)
        assert (partly.success, list(partly.successful_keys)) == (False, [key(1)])
        assert list(alone.tier.get_finished_jobs()) == []
        first = alone.tier.get_stats()
        figures = first.reduce()
        assert set(figures) == set(declared)
        assert all(name.startswith(prefix) for name in figures)
        wanted = {"stored": 3, "loaded": 3, "missed": 1, "queue": 0, "stalled": 0, "errors": 0}
        assert {name: figures[prefix + name] for name in wanted} == wanted
        assert alone.tier.get_stats() is None
        alone.load(1)
        assert alone.tier.get_stats().reduce()[f"{prefix}loaded"] == 1
        kinds = {name: type(each).__name__ for name, each in declared.items()}
        for name, kind in first.data["types"].items():
            assert kinds[name] == f"Offloading{kind.title()}Metadata"
    with Alone(where) as again:  # another engine
        assert again.there(0, 1, 2, 3) == [0, 1, 2]


def on_redis() -> None:
    with server() as running:
        _stores_and_loads(on(running), "vllm:memlane_redis_tier_")


def in_a_bucket() -> None:
    with folder() as path:
        _stores_and_loads({"type": "ObjectTier", "url": path.as_uri()}, "vllm:memlane_object_tier_")


def on_mooncake() -> None:
    with folder() as path, MooncakeMaster(path / "log", LONG_LEASE) as master:
        lender = {"type": "MooncakeTier", "master": master.address, "segment": "16MiB"}
        with Alone(lender, namespace="lender"):
            _stores_and_loads(
                {"type": "MooncakeTier", "master": master.address}, "vllm:memlane_mooncake_tier_"
            )


def questions_go_together() -> None:
    """vLLM asks for one key a call; a thousand of them are no thousand messages."""

    def reads(running: RedisServer) -> int:
        answer = running.call("INFO", "stats").decode()
        return int(answer.partition("total_reads_processed:")[2].split()[0])

    with server() as running, Alone(on(running)) as alone:
        alone.store(0)
        before = reads(running)
        assert alone.there(*range(1000)) == [0]
        assert reads(running) - before < 200


def steps_that_take_long() -> None:
    """The answer is there when somebody comes to read it."""
    with server() as running, Alone(on(running)) as alone:
        alone.store(0)
        with Alone(on(running)) as other:
            context = request("slow")
            assert [other.tier.lookup(key(at), context) for at in (0, 1)] == [RETRY, RETRY]
            time.sleep(1.5)
            assert [other.tier.lookup(key(at), context) for at in (0, 1)] == [HIT, MISS]


def answers_that_never_come() -> None:
    """A request waits for the timeout, and for no longer, whatever it asks for; one that was
    preempted may wait again."""
    timeout = 0.5
    with (
        server() as running,
        Alone(on(running), timeout=timeout) as alone,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(alone.tier._tier, "has", lambda keys: [None] * len(keys))
        first, second = request("first"), request("second")
        begun = time.monotonic()
        assert asked(alone.tier, 0, first) is MISS
        assert time.monotonic() - begun >= timeout
        assert alone.tier.lookup(key(1), first) is MISS
        assert alone.tier.lookup(key(0), second) is RETRY
        for context in (
            ScheduleEndContext(new_req_ids=["first"], preempted_req_ids=()),
            ScheduleEndContext(new_req_ids=[], preempted_req_ids=("first",)),
        ):
            alone.tier.on_schedule_end(context)
            assert alone.tier.lookup(key(0), first) is RETRY
            assert asked(alone.tier, 0, first) is MISS
        for each in (first, second):
            alone.tier.on_request_finished(each)
        assert alone.tier._patience == {}


def questions_that_are_refused() -> None:
    """They are answered: by no."""
    with server() as running, Alone(on(running)) as alone:
        alone.store(0)
        assert running.call("ACL", "SETUSER", "default", "-exists") == b"+OK\r\n"
        time.sleep(1.1)  # until what was stored is asked for again
        begun = time.monotonic()
        assert alone.there(0, 1) == []
        assert_in_time(3, begun)  # not the timeout


def evicted_before_it_is_loaded() -> None:
    """Is a miss, of which nobody asks at once."""
    with server() as running, Alone(on(running)) as alone:
        alone.store(0, 1)
        assert alone.there(0, 1) == [0, 1]
        running.call("FLUSHALL")
        result = alone.load(0, 1)
        assert (result.success, list(result.successful_keys)) == (False, [])
        assert [alone.tier.lookup(key(at), request("request")) for at in (0, 1)] == [MISS, MISS]
        alone.store(0)
        assert alone.there(0, 1) == [0]


def events_of_a_server() -> None:
    """Events report what this engine has stored, or found of others; what its loads miss; and a
    reset, after which an earlier store is reported."""
    with server() as running:
        where = on(running)
        with Alone(where, EVENTS) as first, Alone(where, EVENTS) as second:
            assert first.tier.locality is Locality.REMOTE
            first.store(0, 1)
            assert events(first.tier) == [(False, [0, 1])]
            assert second.there(1, 2) == [1]
            assert second.there(1) == [1]
            assert events(second.tier) == [(False, [1])]
            running.call("FLUSHALL")
            second.load(1)
            assert events(second.tier) == [(True, [1])]
            first.load(0)
            assert events(first.tier) == [(True, [0])]
            first.tier.submit_store(first.job([3], [0], False))
            first.tier.drain_jobs()
            until(lambda: [*first.tier.get_finished_jobs()] != [])
            assert events(first.tier) == [(True, [1])]


def events_of_more_than_is_remembered() -> None:
    """The oldest are reported as removed."""
    with server() as running, Alone(on(running), EVENTS) as alone:
        alone.tier._inventory._most = 2
        alone.store(0, 1, 2)
        assert events(alone.tier) == [(False, [0, 1, 2])]
        assert events(alone.tier) == [(True, [0])]
        assert events(alone.tier) == []
        assert alone.there(0) == [0]
        assert events(alone.tier) == [(False, [0])]


def loads_that_are_refused() -> None:
    """By a server that says the block is there: nobody asks at once, but when it is stored."""
    with server() as running:
        engine = Engine(on(running))
        engine.store(0, 1)
        assert running.call("ACL", "SETUSER", "default", "-get") == b"+OK\r\n"
        engine.store(4, 5, 6, 7)
        assert engine.load(0, 1) == []
        assert running.call("ACL", "SETUSER", "default", "+get") == b"+OK\r\n"
        assert engine.tier.lookup(key(0), request("request")) is MISS
        engine.store(0)
        engine.store(4, 5, 6, 7)
        assert engine.load(0, 1) == [0]
        engine.manager.shutdown()


def wrong_values() -> None:
    """A value of another length, or with other bytes, is a miss until it is stored again."""
    for value in (b"", b"x" * ROW, b"MLT1" + bytes(ROW + 12)):
        with server() as running, Alone(on(running)) as alone, logged() as lines:
            alone.store(0, 1)
            overwrite(running, value)
            alone.store(2)
            result = alone.load(0, 1, 2)
            assert (result.success, list(result.successful_keys)) == (False, [key(2)])
            assert alone.there(0, 1, 2) == [2]
            alone.store(0, 1)
            assert alone.there(0, 1, 2) == [0, 1, 2]
            assert alone.load(0, 1, 2).success
            assert alone.tier.get_stats().reduce()["vllm:memlane_redis_tier_corrupt"] == 2
            assert lines == []


def the_end_of_it() -> None:
    """Nothing keeps the memory; a server that hangs does for as long as the timeout at most."""
    with server() as running:
        alone = Alone(on(running), timeout=1.0)
        alone.store(0)
        running.stop()
        try:
            job = alone.job([1], [1], False)
            alone.tier.submit_store(job)
            begun = time.monotonic()
            alone.tier.shutdown()
            assert_in_time(2.5, begun)
        finally:
            running.go_on()
        alone.view.release()
        with pytest.raises(Closed):
            alone.tier.lookup(key(0), request("request"))
        alone.tier.shutdown()


# Behind vLLM's manager -----------------------------------------------------------------------


def evicted_from_memory() -> None:
    """Blocks that memory has evicted come back from the server, also in another engine."""
    with server() as running:
        engine = Engine(on(running))
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        assert engine.in_memory(*range(8)) == [4, 5, 6, 7]
        assert engine.load(0, 1, 2, 3) == [0, 1, 2, 3]
        assert engine.load(6, 7, 8) == [6, 7]
        stats = engine.manager.get_stats().reduce()
        assert stats["vllm:memlane_redis_tier_stored"] == 8
        assert stats["vllm:memlane_redis_tier_loaded"] == 6
        again = Engine(on(running))
        assert again.load(*range(4)) == [0, 1, 2, 3]
        for each in (engine, again):
            each.manager.shutdown()  # releases the memory


def killed_in_the_middle() -> None:
    """Requests go on without it, at once, with one line; once it runs again it is used again."""
    with server() as running, logged() as lines:
        engine = Engine(on(running))
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        running.kill()
        begun = time.monotonic()
        assert engine.load(0, 1, 2, 3) == []
        engine.store(0, 1, 2, 3)
        assert engine.load(4, 5, 6, 7) == []
        assert_in_time(5, begun)
        assert len(lines) == 1
        assert "it is skipped until it does" in lines[0]
        running.start()
        end = time.monotonic() + PATIENCE
        numbers = range(100, 104)
        while not running.names():
            assert time.monotonic() < end
            engine.store(*numbers)
            numbers = range(numbers.stop, numbers.stop + 4)
            time.sleep(0.1)
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        assert engine.load(0, 1, 2, 3) == [0, 1, 2, 3]
        engine.manager.shutdown()


def stopped_in_the_middle() -> None:
    """The first request waits for the timeout; the next ones do not, also while the server is
    tried again."""
    timeout = 1.5
    with server() as running, logged() as lines:
        engine = Engine(on(running), timeout=timeout)
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        time.sleep(1.1)  # until what was stored is asked for again
        running.stop()
        try:
            begun = time.monotonic()
            assert engine.load(0, 1, 2, 3) == []
            assert time.monotonic() - begun > 1.0
            assert_in_time(timeout + 2.0, begun)
            until(lambda: lines)
            for number in range(100, 140):  # through several attempts
                context = request(str(number))
                assert engine.tier.lookup(key(number), context) is MISS, number
                time.sleep(0.1)
            assert len(lines) == 1
        finally:
            running.go_on()
        until(lambda: engine.load(0, 1, 2, 3) == [0, 1, 2, 3])
        engine.manager.shutdown()


def wrong_and_promoted() -> None:
    """Those blocks are computed again; their request and the engine go on."""
    with server() as running:
        engine = Engine(on(running))
        engine.store(0, 1, 2, 3)
        overwrite(running, b"x" * (ROW + 16))
        engine.store(4, 5, 6, 7)
        assert engine.load(0, 1, 2, 3) == []
        engine.store(0, 1, 2, 3)
        engine.store(4, 5, 6, 7)
        assert engine.load(0, 1, 2, 3) == [0, 1, 2, 3]
        engine.manager.shutdown()


def a_disk_and_a_server() -> None:
    """vLLM stores in both, and asks the disk first; what the disk has evicted, or has changed,
    comes from the server. Without the server the disk serves on."""
    with server() as running, folder() as path:
        disk = {
            "type": "DiskTier",
            "path": str(path),
            "capacity": capacity_of(8),
            "policy": "lru",
            "direct": False,
        }
        engine = Engine(disk, on(running))
        for start in range(0, 16, 4):
            engine.store(*range(start, start + 4))
        assert engine.load(0, 1, 2, 3) == [0, 1, 2, 3]  # not on disk
        assert engine.load(8, 9, 10, 11) == [8, 9, 10, 11]  # on disk
        figures = engine.manager.get_stats().reduce()
        names = ("disk_tier_stored", "redis_tier_stored", "disk_tier_loaded", "redis_tier_loaded")
        found = [figures[f"vllm:memlane_{name}"] for name in names]
        assert found == [16, 16, 4, 4]
        data = path / "0.data"
        data.write_bytes(bytes(data.stat().st_size))
        engine.store(20, 21, 22, 23)
        assert engine.load(12, 13, 14, 15) == [12, 13, 14, 15]
        running.kill()
        engine.store(24, 25, 26, 27)
        engine.store(28, 29, 30, 31)
        assert engine.load(24, 25, 26, 27) == [24, 25, 26, 27]
        assert engine.load(0, 1) == []
        engine.manager.shutdown()


def replicas_that_share_a_folder() -> None:
    """Each replica loads what the other has computed, and stores only in files of its own."""
    with folder() as path:
        disk = {
            "type": "DiskTier",
            "path": str(path),
            "capacity": capacity_of(32),
            "policy": "lru",
            "direct": False,
        }
        others = {"type": "ReplicaTier", "path": str(path)}
        first = Engine({**disk, "opener": "0"}, {**others, "own": "0"})
        second = Engine({**disk, "opener": "1"}, {**others, "own": "1"})
        first.store(0, 1, 2, 3)
        assert second.load(0, 1, 2, 3) == [0, 1, 2, 3]
        second.store(10, 11)
        time.sleep(1.1)  # until it looks again
        assert first.load(10, 11) == [10, 11]
        assert first.load(20, 21) == []
        for engine, loaded in ((first, 2), (second, 4)):
            figures = engine.manager.get_stats().reduce()
            assert figures["vllm:memlane_replica_tier_loaded"] == loaded
            assert figures["vllm:memlane_replica_tier_stored"] == 0
            engine.manager.shutdown()


def reset_while_blocks_are_under_way() -> None:
    """Clears memory and not the server, if it is told so, also while a promotion is queued."""
    with server() as running:
        engine = Engine(on(running, on_reset="keep"))
        engine.store(0, 1)
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.in_memory(0, 1) == []
        engine.manager.lookup(key(0), request("queued"))
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.load(0, 1) == [0, 1]
        engine.manager.shutdown()


def reset_one_after_the_other() -> None:
    """The stores of an engine that is not reset yet are not found by the one that is, also if that
    has been reset as often before."""
    with server() as running:
        first, second = Engine(on(running)), Engine(on(running))
        first.store(0, 1)
        for engine in (first, second):
            second.store(2)
            engine.manager.reset_cache()
            getattr(engine.manager, "on_reset_flushed", lambda: None)()
            assert engine.load(0, 1, 2) == []
        first.store(3)
        assert (first.load(3), second.load(3)) == ([3], [])
        for engine in (first, second):
            engine.manager.shutdown()


def reset_without_a_server() -> None:
    """Nothing of before is found, though it is still there."""
    with server() as running, logged() as lines:
        engine = Engine(on(running, timeout=1.0))
        engine.store(0)
        running.stop()
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        running.go_on()
        until(lambda: not engine.manager.secondary_tiers[0]._tier.statistics().stalled)
        assert len(running.names()) == 1
        assert engine.load(0) == []
        assert len([line for line in lines if "could not be emptied" in line]) == 1
        engine.manager.shutdown()
