"""The offload region: KV-cache blocks that all workers of a host share, and moving them."""

from memlane.offload.copy import copy_blocks
from memlane.offload.cuda import BlockTransfer
from memlane.offload.region import SharedOffloadRegion

__all__ = ["BlockTransfer", "SharedOffloadRegion", "copy_blocks"]
