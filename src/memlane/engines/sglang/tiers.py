"""A storage backend of SGLang's hierarchical cache over a tier of memlane (0.5.23).

`--hicache-storage-backend dynamic`, with `--hicache-storage-backend-extra-config`:

    {"backend_name": "memlane", "module_path": "memlane.engines.sglang.tiers",
     "class_name": "TierStorage", "interface_v1": 1,
     "memlane": {"tier": "RedisTier", "url": "redis://cache:6379/0"}}

Each rank has one, over its own host memory. SGLang's threads wait in its calls.
"""

from __future__ import annotations

import json
import logging
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import sglang
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from memlane._base.deadline import seconds_of
from memlane._importing import fork_waits
from memlane.errors import InvalidArgument, Unsupported

if TYPE_CHECKING:
    from memlane.tiers import Done, Ticket

_log = logging.getLogger("sglang.memlane")
_PLACES = {"DiskTier": "path", "RedisTier": "url", "ObjectTier": "url", "MooncakeTier": "master"}
_NOT_OF_BLOCKS = ("extra_config", "enable_storage_metrics", "dp_rank")
_OF_POOLS = ("layout", "page_size", "dtype", "layer_num", "head_num", "head_dim")
_LOOK = 0.05  # seconds, at most, until a thread sees what another has polled
_PAUSE = 0.001  # seconds between two questions


class TierStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is not here
    """Pages of one rank: each part that SGLang's pool keeps in one piece is a block.

    Of the layouts all that keep such parts equally long and in one tensor: `page_first`,
    `page_first_direct`, `page_head`, and `layer_first`, whose many parts are slower.
    """

    def __init__(self, storage_config: Any, _: Any = None) -> None:
        """Args:
            storage_config: its `extra_config` has the key `memlane`: `tier`, one of memlane's
                classes, and the arguments of that.

        Raises:
            InvalidArgument: `memlane` or `interface_v1` is missing, there is no such tier, or
                there is a list of places for a tier that has one.
            Unsupported: the ranks do not each keep what they load.
        """
        extra = storage_config.extra_config
        own = dict(extra.get("memlane") or {})
        self._kind = own.pop("tier", None)
        if self._kind not in _PLACES or _PLACES[self._kind] not in own:
            known = ", ".join(f"{kind} with {place}" for kind, place in _PLACES.items())
            raise InvalidArgument(f'"memlane" needs the key "tier" and a place: {known}')
        place = _PLACES[self._kind]
        if isinstance(own[place], list) and self._kind != "DiskTier":
            raise InvalidArgument(f"a {self._kind} has one {place}, not a list")
        if not extra.get("interface_v1"):
            raise InvalidArgument('SGLang needs "interface_v1": 1 beside "class_name"')
        is_shared = storage_config.is_mla_model and storage_config.tp_size > 1
        if storage_config.should_split_heads or (is_shared and self._kind == "DiskTier"):
            raise Unsupported(f"a {self._kind} cannot share pages between ranks")
        self._own, self._config = own, storage_config
        self._timeout = seconds_of(
            own.setdefault("timeout", 10.0 if self._kind == "ObjectTier" else 5.0)
        )
        self._tier: Any = None
        self._changed = threading.Condition()
        self._is_polled = False  # by a thread that waits
        self._done: dict[Ticket, Done] = {}

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Opens the tier over the pool's memory.

        Raises:
            Unsupported: its pages are not parts of one size in one tensor.
            MemlaneError: as the tier's own constructor.
        """
        with fork_waits:
            from memlane import tiers

        super().register_mem_pool_host(mem_pool_host)
        pool, buffer = mem_pool_host, mem_pool_host.kv_buffer
        addresses, sizes = pool.get_page_buffer_meta(torch.arange(pool.page_size))
        nbytes = sizes[0]
        self._parts = len(sizes)
        if (
            not isinstance(buffer, torch.Tensor)
            or not buffer.is_contiguous()
            or set(sizes) != {nbytes}
            or any((address - buffer.data_ptr()) % nbytes for address in addresses)
            or buffer.nbytes % nbytes
        ):
            raise Unsupported(f"pages of the layout {pool.layout} are not of one piece")
        rows = buffer.flatten().view(torch.uint8).numpy().reshape(-1, nbytes)
        self._base, self._row_bytes = buffer.data_ptr(), nbytes
        config, own = self._config, dict(self._own)
        facts = {name: value for name, value in vars(config).items() if name not in _NOT_OF_BLOCKS}
        facts |= {name: str(getattr(pool, name, None)) for name in _OF_POOLS}
        facts |= {"bytes": nbytes, "release": sglang.__version__}
        if config.is_mla_model:  # all have the same, and one stores it
            del facts["tp_rank"]
        if self._kind == "DiskTier":
            ranks = (config.dp_rank, config.pp_rank, config.tp_rank, config.attn_cp_rank)
            rank = "-".join(map(str, ranks))
            own = {"opener": rank, "name": f"sglang.disk[{rank}]", **own}
        own["namespace"] = json.dumps([facts, own.get("namespace", "")], sort_keys=True)
        place = own.pop(_PLACES[self._kind])
        if isinstance(place, list):  # of folders
            self._tier = tiers.DiskArray(place, rows, **own)
        else:
            self._tier = getattr(tiers, self._kind)(place, rows, **own)
        _log.info("a %s: %d rows of %d bytes, %d a page", self._kind, *rows.shape, self._parts)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Raises Unsupported: the model has more than one pool."""
        if str(host_pool_name) != "kv":
            raise Unsupported(f"memlane keeps KV pages only, not {host_pool_name}")

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        return [f"{key}:{part}".encode() for key in keys for part in range(self._parts)]

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Returns how many of the first ones are there."""
        names, end = self._names(keys), time.monotonic() + self._timeout
        while True:
            there = self._tier.has(names)
            run = next((at for at, is_there in enumerate(there) if not is_there), len(names))
            if run == len(names) or there[run] is False or time.monotonic() > end:
                return run // self._parts
            time.sleep(_PAUSE)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        return self._pages(self._do(self._tier.load, keys, host_indices))

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None
    ) -> list[bool]:
        done = self._do(self._tier.store, keys, host_indices)
        if done.error is None:  # what a policy declines is no failure
            return [True] * len(keys)
        return self._pages(done)

    def _pages(self, done: Done) -> list[bool]:
        """The pages of which every part is there."""
        return [bool(each.all()) for each in done.ok.reshape(-1, self._parts)]

    def get(self, *_: Any, **__: Any) -> Any:
        """Belongs to the interface that `interface_v1` replaces; never called."""
        raise Unsupported("memlane has SGLang's interface_v1 only")

    set = batch_get = batch_set = get

    def clear(self) -> None:
        self._tier.clear()

    def close(self) -> None:
        if self._tier is not None:
            self._tier.close(self._timeout + 1.0)

    def _do(
        self, call: Callable[..., Ticket], keys: Sequence[str], host_indices: torch.Tensor
    ) -> Done:
        """A call, and its report. One of the threads that wait polls for all."""
        addresses, _ = self.mem_pool_host.get_page_buffer_meta(host_indices)
        rows: npt.NDArray[np.int64] = (np.array(addresses) - self._base) // self._row_bytes
        ticket = call(self._names(keys), rows)
        with self._changed:
            while ticket not in self._done:
                if self._is_polled:
                    self._changed.wait(_LOOK)
                    continue
                self._is_polled = True
                self._changed.release()
                try:
                    poller = select.poll()
                    poller.register(self._tier.fileno(), select.POLLIN)
                    poller.poll(1000 * _LOOK)
                finally:
                    self._changed.acquire()
                    self._is_polled = False
                self._done |= {done.ticket: done for done in self._tier.poll()}
                self._changed.notify_all()
            return self._done.pop(ticket)
