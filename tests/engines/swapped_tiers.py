"""memlane's disk tier in the places of vLLM's example tier and file tier, for vLLM's own tests.

These wait for jobs by `drain_jobs`, which vLLM only calls to reset its caches, and keep the blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.example import manager as example
from vllm.v1.kv_offload.tiering.fs import manager as fs

from memlane.engines.vllm.tiers import DiskTier, TunedPolicy
from tests.v1.kv_offload.conftest import make_offloading_config

SPEC = SimpleNamespace(config=make_offloading_config())


class ExampleTier(DiskTier):
    """On a disk of its own. As the example, it has done a job when it has been given it."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: Any,
        tier_type: str,
        custom_param: int = 0,
        backpressure_detector: Any = None,
    ) -> None:
        if not isinstance(primary_kv_view, memoryview):  # a mock
            primary_kv_view = memoryview(np.zeros((5, 16), np.int8))
        self._folder = TemporaryDirectory()
        own = {"path": self._folder.name, "capacity": "1MiB", "on_reset": "keep"}
        super().__init__(SPEC, primary_kv_view, tier_type, backpressure_detector, **own)
        self.completed_jobs: list[JobResult] = []
        self.chunks = Chunks(self)

    def submit_store(self, job_metadata: TransferJob) -> None:
        super().submit_store(job_metadata)
        self._finish()

    def submit_load(self, job_metadata: TransferJob) -> None:
        super().submit_load(job_metadata)
        self._finish()

    def _finish(self) -> None:
        self._tier.drain()
        self.completed_jobs += super().get_finished_jobs()

    def get_finished_jobs(self) -> Iterable[JobResult]:
        finished = list(self.completed_jobs)
        self.completed_jobs.clear()
        return finished

    def get_num_chunks(self) -> int:
        return self._tier.statistics().blocks


class Chunks:
    """The example has a dictionary; here, what is put into it is stored."""

    def __init__(self, tier: ExampleTier) -> None:
        self._disk = tier._tier

    def __setitem__(self, key: bytes, _: bool) -> None:
        self._disk.store([key], [0])
        self._disk.drain()
        assert self._disk.poll()[0].ok.all()


class FileTier(DiskTier):
    """Finds keys at once, and has all blocks in one file."""

    def __init__(
        self, root_dir: str, n_read_threads: int = 1, n_write_threads: int = 1, **given: Any
    ) -> None:
        super().__init__(path=root_dir, capacity="32MiB", on_reset="keep", **given)
        self._lookup_manager = SimpleNamespace(
            _pending_results=SimpleNamespace(empty=lambda: False)
        )
        self.file_mapper = SimpleNamespace(get_file_name=lambda _: f"{root_dir}/0.data")


def swap() -> None:
    """Tests that are imported from now on get these classes, and the policy `lru` is memlane's."""
    example.ExampleSecondaryTierManager = ExampleTier
    fs.FileSystemTierManager = FileTier
    CachePolicyFactory._registry["lru"] = lambda: TunedPolicy
