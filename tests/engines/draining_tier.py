"""The disk tier for tests of a real engine, which answers prompts faster than a busy disk stores
their blocks: vLLM's memory would be full of blocks that are being stored, and those that find no
room there are offered to no tier."""

from __future__ import annotations

from typing import Any

from memlane.engines.vllm import tiers


class DiskTier(tiers.DiskTier):
    """Waits at the end of each request until nothing is under way."""

    def on_request_finished(self, req_context: Any) -> None:
        super().on_request_finished(req_context)
        self._tier.drain()
