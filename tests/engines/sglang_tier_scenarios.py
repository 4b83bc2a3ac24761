"""SGLang's cache controller with a tier of memlane; `running.run` runs each function.

The factory, the base class and the host pools' addresses are SGLang's; its controller needs a GPU.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

from memlane import InvalidArgument, Unsupported
from tests.support import PATIENCE, assert_in_time
from tests.support.redis_servers import RedisServer

PAGE, PAGES, LAYERS, HEADS, DIM = 4, 8, 3, 2, 16
SHAPES = {
    "page_first": (2, PAGES * PAGE, LAYERS, HEADS, DIM),
    "page_first_direct": (2, PAGES, LAYERS, PAGE, HEADS, DIM),
    "layer_first": (2, LAYERS, PAGES * PAGE, HEADS, DIM),
}


def pool(layout: str = "page_first") -> Any:
    """SGLang's, without its device pool: its own arithmetic, over a buffer of that layout."""
    made = object.__new__(MHATokenToKVPoolHost)
    made.layout, made.page_size, made.size = layout, PAGE, PAGES * PAGE
    made.layer_num, made.head_num, made.head_dim = LAYERS, HEADS, DIM
    made.dtype = torch.bfloat16
    made.kv_buffer = torch.randn(SHAPES[layout]).to(torch.bfloat16)
    return made


def page_of(over: Any, number: int) -> Any:
    """The values of that page."""
    tokens = slice(number * PAGE, (number + 1) * PAGE)
    if over.layout == "page_first":
        return over.kv_buffer[:, tokens]
    if over.layout == "page_first_direct":
        return over.kv_buffer[:, number]
    return over.kv_buffer[:, :, tokens]


def indices(*numbers: int) -> torch.Tensor:
    return torch.cat([torch.arange(number * PAGE, (number + 1) * PAGE) for number in numbers])


def config(own: dict[str, Any] | None, **changes: Any) -> Any:
    extra = {
        "backend_name": "memlane",
        "module_path": "memlane.engines.sglang.tiers",
        "class_name": "TierStorage",
        "interface_v1": 1,
        "memlane": own,
        **changes.pop("extra", {}),
    }
    facts: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 2,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "model",
        "extra_config": extra,
    }
    return HiCacheStorageConfig(**{**facts, **changes})


@contextmanager
def storage(own: dict[str, Any], over: Any, **changes: Any) -> Iterator[Any]:
    """As the controller makes one."""
    made = StorageBackendFactory.create_backend("dynamic", config(own, **changes), over)
    made.register_mem_pool_host(over)
    made.register_mem_host_pool_v2(over, "kv")
    made.on_host_pools_registered()
    try:
        yield made
    finally:
        made.close()


@contextmanager
def server() -> Iterator[RedisServer]:
    with TemporaryDirectory() as there, RedisServer(Path(there)) as running:
        yield running


def on(running: RedisServer, **own: Any) -> dict[str, Any]:
    return {"tier": "RedisTier", "url": running.url, "timeout": PATIENCE, **own}


def configurations() -> None:
    """A configuration that cannot work is an error at the start."""
    place = 'needs the key "tier" and a place: DiskTier with path, RedisTier with url'
    for own in (None, {}, {"tier": "Redis", "url": "u"}, {"tier": "RedisTier", "path": "p"}):
        with pytest.raises(InvalidArgument, match=place):
            StorageBackendFactory.create_backend("dynamic", config(own), pool())
    good = {"tier": "RedisTier", "url": "redis://127.0.0.1:1"}
    with pytest.raises(InvalidArgument, match='SGLang needs "interface_v1": 1'):
        StorageBackendFactory.create_backend(
            "dynamic", config(good, extra={"interface_v1": 0}), pool()
        )
    with pytest.raises(InvalidArgument, match="a RedisTier has one url, not a list"):
        StorageBackendFactory.create_backend("dynamic", config({**good, "url": ["u"]}), pool())
    disk = {"tier": "DiskTier", "path": "/nowhere", "capacity": "1MiB"}
    with pytest.raises(Unsupported, match="a DiskTier cannot share pages between ranks"):
        StorageBackendFactory.create_backend("dynamic", config(disk, is_mla_model=True), pool())
    with server() as running, storage(on(running), pool()) as made:
        with pytest.raises(Unsupported, match="memlane keeps KV pages only, not mamba"):
            made.register_mem_host_pool_v2(None, "mamba")
        with pytest.raises(Unsupported, match="interface_v1 only"):
            made.batch_get(["key"])
        two = pool()
        two.kv_buffer = [two.kv_buffer[0], two.kv_buffer[1]]
        two.get_page_buffer_meta = lambda _: ([0], [64])
        with pytest.raises(Unsupported, match="pages of the layout page_first are not of one"):
            made.register_mem_pool_host(two)


def pages_come_back() -> None:
    """Pages of each layout come back in other pages and another process's pool than they were
    stored from."""
    for layout in SHAPES:
        with server() as running:
            one, other = pool(layout), pool(layout)
            with storage(on(running), one) as first, storage(on(running), other) as second:
                assert first.batch_exists(["a", "b"]) == 0
                assert first.batch_set_v1(["a", "b", "c"], indices(0, 3, 5)) == [True] * 3
                assert second.batch_exists(["a", "b", "c", "d"]) == 3
                assert second.batch_exists(["d", "a"]) == 0
                assert (second.exists("b"), second.exists("d")) == (True, False)
                kept = page_of(other, 6).clone()
                found = second.batch_get_v1(["c", "d", "a"], indices(1, 2, 7))
                assert found == [True, False, True]
                assert torch.equal(page_of(other, 1), page_of(one, 5))
                assert torch.equal(page_of(other, 7), page_of(one, 0))
                assert torch.equal(page_of(other, 6), kept)
                first.clear()
            with storage(on(running), one) as again:
                assert again.batch_exists(["a"]) == 0


def whose_pages() -> None:
    """Ranks and models keep apart; data-parallel replicas do not, nor ranks that have the same."""
    with server() as running, storage(on(running), pool()) as made:
        assert made.batch_set_v1(["a"], indices(0)) == [True]
        for changes, found in (
            ({}, 1),
            ({"dp_rank": 3}, 1),
            ({"tp_rank": 1}, 0),
            ({"tp_size": 4}, 0),
            ({"model_name": "another"}, 0),
            ({"is_mla_model": True}, 0),
        ):
            with storage(on(running), pool(), **changes) as other:
                assert other.batch_exists(["a"]) == found, changes
        with storage(on(running, namespace="revision"), pool()) as other:
            assert other.batch_exists(["a"]) == 0
        with storage(on(running), pool("page_first_direct")) as other:
            assert other.batch_exists(["a"]) == 0
        same: dict[str, Any] = {"is_mla_model": True}
        with storage(on(running), pool(), **same) as writer:
            writer.batch_set_v1(["b"], indices(0))
            with storage(on(running), pool(), **same, tp_rank=1) as reader:
                assert reader.batch_exists(["b"]) == 1


def a_server_that_ends() -> None:
    """Calls return, and say no; wrong bytes are no page."""
    with server() as running, storage(on(running), pool()) as made:
        assert made.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
        name = sorted(running.names())[0]
        running.call("SET", name, b"x")
        found = made.batch_get_v1(["a", "b"], indices(2, 3))
        assert sorted(found) == [False, True]
        running.kill()
        begun = time.monotonic()
        assert made.batch_get_v1(["a", "b"], indices(2, 3)) == [False, False]
        assert made.batch_set_v1(["c"], indices(0)) == [False]
        assert made.batch_exists(["a"]) == 0
        assert_in_time(5, begun)


def two_threads() -> None:
    """As SGLang's: one stores while another loads; each gets its own reports."""
    with server() as running:
        over = pool()
        with storage(on(running), over) as made:
            assert made.batch_set_v1(["a"], indices(0)) == [True]
            wrong: list[Any] = []

            def backup() -> None:
                for number in range(100):
                    if made.batch_set_v1([f"{number}", "a"], indices(1, 0)) != [True, True]:
                        wrong.append(number)

            thread = threading.Thread(target=backup)
            thread.start()
            while thread.is_alive():
                assert made.batch_get_v1(["a", "nothing"], indices(2, 3)) == [True, False]
            thread.join(PATIENCE)
            assert wrong == []
            assert torch.equal(page_of(over, 2), page_of(over, 0))
            assert made.batch_exists([str(number) for number in range(100)]) == 100


def on_a_disk() -> None:
    """Each rank has files of its own in the folder."""
    with TemporaryDirectory() as there:
        own = {"tier": "DiskTier", "path": there, "capacity": "1MiB", "policy": "lru"}
        over = pool()
        with storage(own, over) as first, storage(own, pool(), tp_rank=1) as second:
            assert first.batch_set_v1(["a"], indices(0)) == [True]
            assert (first.batch_exists(["a"]), second.batch_exists(["a"])) == (1, 0)
            assert first.batch_get_v1(["a"], indices(4)) == [True]
            assert torch.equal(page_of(over, 4), page_of(over, 0))
        own["path"] = [f"{there}/a", f"{there}/b"]
        with storage(own, over) as first:
            assert first.batch_set_v1(["a", "b"], indices(0, 1)) == [True, True]
            assert first.batch_get_v1(["b", "a"], indices(4, 5)) == [True, True]
            assert torch.equal(page_of(over, 5), page_of(over, 0))
