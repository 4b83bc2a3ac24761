"""Engines' own modules without their requirements: a few are real, all others are stubs."""

from __future__ import annotations

import base64
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

# Not a package: what they import is a shell unless it stands here, too.
REAL = {
    "vllm.envs",
    "vllm.plugins",
    "vllm.logger",
    "vllm.logging_utils",
    "vllm.utils.math_utils",
    "vllm.utils.network_utils",
    "vllm.utils.system_utils",
    "vllm.distributed.utils",
    "vllm.distributed.parallel_state",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler",
    "vllm.distributed.device_communicators.shm_broadcast",
    "vllm.distributed.device_communicators.shm_tensor_arena",
    "vllm.distributed.device_communicators.shm_object_storage",
    "vllm.multimodal.cache.shm",
    "vllm.multimodal.inputs",
    "vllm.utils.collection_utils",
    "vllm.utils.jsontree",
    "vllm.utils.mem_constants",
    "vllm.v1.serial_utils",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.ray_executor_v2",
    "vllm.v1.hisparse.runtime",
    "vllm.v1.kv_offload.base",
    "vllm.v1.kv_offload.config",
    "vllm.v1.kv_offload.cpu.common",
    "vllm.v1.kv_offload.cpu.gpu_worker",
    "vllm.v1.kv_offload.cpu.host_register",
    "vllm.v1.kv_offload.cpu.manager",
    "vllm.v1.kv_offload.cpu.policies",
    "vllm.v1.kv_offload.cpu.shared_offload_region",
    "vllm.v1.kv_offload.cpu.spec",
    "vllm.v1.kv_offload.factory",
    "vllm.v1.kv_offload.file_mapper",
    "vllm.v1.kv_offload.tiering",
    "vllm.v1.metrics.cache_hit_source",
    "sglang.srt.environ",
    "sglang.srt.plugins",
    "sglang.srt.distributed.device_communicators.shm_broadcast",
    "sglang.srt.mem_cache.hicache_storage",
    "sglang.srt.mem_cache.pool_host",
    "sglang.srt.mem_cache.storage.backend_factory",
    "sglang.srt.utils.network",
    "sglang.srt.utils.stale_shm_cleanup",
}
# Other packages that they need and memlane's tests have not.
SHELLS = (
    "cloudpickle",
    "psutil",
    "urllib3",
    "regex",
    "cachetools",
    "PIL",
    "pydantic",
    "pydantic_core",
    "prometheus_client",
    "pybase64",
    "ray",
)


def unchanged(*given: Any, **named: Any) -> Any:
    """Any function of a shell. As a decorator it leaves what it decorates."""
    return given[0] if len(given) == 1 and callable(given[0]) and not named else unchanged


class _Empty:
    """Any class of a shell."""

    __class_getitem__ = classmethod(lambda cls, _: cls)


class _Shell(ModuleType):
    """Has any name: classes without content, and functions that do nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if f"{self.__name__}.{name}" in REAL:
            return importlib.import_module(f"{self.__name__}.{name}")
        is_class = name[0].isupper() and not name.isupper()
        value = type(name, (_Empty,), {}) if is_class else unchanged
        setattr(self, name, value)
        return value


class _ShellLoader(importlib.abc.Loader):
    def __init__(self, known: dict[str, dict[str, Any]]) -> None:
        self._known = known

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Shell(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._known.get(module.__name__, {}))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, folder: Path, known: dict[str, dict[str, Any]]) -> None:
        self._folder = folder
        self._loader = _ShellLoader(known)

    def find_spec(
        self, name: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parents = [name.rsplit(".", level)[0] for level in range(name.count(".") + 1)]
        if REAL & set(parents):
            place = self._folder / name.replace(".", "/")
            if place.is_dir():
                return importlib.util.spec_from_file_location(
                    name, place / "__init__.py", submodule_search_locations=[str(place)]
                )
            return importlib.util.spec_from_file_location(name, place.with_suffix(".py"))
        if parents[-1] in ("vllm", "sglang", *SHELLS):
            return importlib.machinery.ModuleSpec(name, self._loader, is_package=True)
        return None


def install(folder: Path, version: str) -> None:
    """From now on the engine's modules come from that folder, as far as they are needed here."""
    if (folder / "vllm/multimodal/cache.py").exists():  # until 0.30
        REAL.add("vllm.multimodal.cache")
    platform = SimpleNamespace(
        device_count=lambda: int(os.environ.get("TEST_DEVICES", "8")),
        is_cuda_alike=lambda: False,
        is_cpu=lambda: True,
        is_rocm=lambda: False,
        is_tpu=lambda: False,
    )
    known = {
        "vllm": {"__version__": version},
        "vllm.platforms": {"current_platform": platform},
        "vllm.platforms.interface": {"get_assigned_physical_gpu_ids": lambda: None},
        "vllm.utils.import_utils": {"LazyLoader": lambda name, *_: importlib.import_module(name)},
        "vllm.utils.cache": {"CacheInfo": SimpleNamespace},
        "vllm.utils.torch_utils": {"PIN_MEMORY": False},
        "vllm.v1.utils": {
            "tensor_data": lambda tensor: tensor.flatten().view(torch.uint8).numpy().data
        },
        "pybase64": {"urlsafe_b64encode": base64.urlsafe_b64encode},
        "pydantic_core": {"core_schema": SimpleNamespace(CoreSchema=object)},
        "sglang": {"__version__": version},
        "sglang.srt.utils": {
            f"is_{device}": lambda: False for device in ("cuda", "hip", "mps", "musa", "npu", "xpu")
        },
        "sglang.srt.distributed.parallel_state": {
            # All ranks of a test share their memory.
            "in_the_same_node_as": lambda pg, source_rank: [True] * dist.get_world_size(pg)
        },
    }
    sys.meta_path.insert(0, _Finder(folder, known))
    sys.modules["multiprocess"] = multiprocessing


def is_installed() -> bool:
    """Returns whether it is installed here already."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)
