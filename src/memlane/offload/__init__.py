"""The offload region: KV-cache blocks that do not fit on the GPU, mapped by all workers."""

from memlane.offload.region import SharedOffloadRegion

__all__ = ["SharedOffloadRegion"]
