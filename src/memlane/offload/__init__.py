"""The offload region: KV-cache blocks shared by all workers of a host, and copies of blocks."""

from memlane.offload.copy import copy_blocks
from memlane.offload.cuda import BlockTransfer
from memlane.offload.region import SharedOffloadRegion

__all__ = ["BlockTransfer", "SharedOffloadRegion", "copy_blocks"]
