"""A stock vLLM's tiers on a CPU, for tests: `spec_module_path` loads this, and nothing is patched.

vLLM's own worker copies between a GPU and the region; this one copies between two tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):  # type: ignore[misc]  # vLLM is not here
    """Copies at once; a chunk is a block."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._own, self._rows = [], []
        for cache in kv_caches.tensors:
            size = cache.page_size_bytes
            self._own.append(cache.tensor.view(torch_int8()).view((-1, size)))
            self._rows.append(region.create_next_worker_view(size))
        self._finished: list[Any] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, self._own, src_spec, self._rows, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False
    ) -> bool:
        return self._copy(job_id, self._rows, src_spec, self._own, dst_spec)

    def _copy(self, job_id: int, sources: Any, source: Any, targets: Any, target: Any) -> bool:
        pairs = list(zip(source.block_ids.tolist(), target.block_ids.tolist(), strict=True))
        for one, other in zip(sources, targets, strict=True):
            for at, to in pairs:
                other[to].copy_(one[at])
        self._finished.append(TransferResult(job_id, True, len(pairs), 1e-6))
        return True

    def get_finished(self) -> list[Any]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """They have ended."""

    def shutdown(self) -> None:
        self._own, self._rows = [], []
        self._region.cleanup()


def torch_int8() -> Any:
    import torch

    return torch.int8


class CpuTiering(TieringOffloadingSpec):  # type: ignore[misc]  # vLLM is not here
    """vLLM's tiers, with that worker."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, region)
        return self._worker


__all__ = ["CpuTiering"]
