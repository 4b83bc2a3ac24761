"""The offload region: KV-cache blocks that all workers of a host share, and moving them."""

from memlane.offload.copy import copy_blocks
from memlane.offload.cuda import BlockTransfer

__all__ = ["BlockTransfer", "copy_blocks"]
