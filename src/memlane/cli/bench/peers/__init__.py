"""The peers that a user may have, in the order in which tables show them."""

from __future__ import annotations

from memlane.cli.bench.channel import Peer
from memlane.cli.bench.peers import iceoryx, memlane_queue, pipe, vllm_queue, zeromq

PEERS: tuple[Peer, ...] = (
    *memlane_queue.PEERS,
    *pipe.PEERS,
    *zeromq.PEERS,
    *iceoryx.PEERS,
    *vllm_queue.PEERS,
)
