"""The peers, in the order in which tables show them."""

from __future__ import annotations

from benchmarks.broadcast.channel import Peer
from benchmarks.broadcast.peers import (
    fifo,
    iceoryx,
    known_design,
    memlane_queue,
    pipe,
    semaphores,
    vllm_queue,
    zeromq,
)

PEERS: tuple[Peer, ...] = (
    *memlane_queue.PEERS,
    *known_design.PEERS,
    *pipe.PEERS,
    *zeromq.PEERS,
    *fifo.PEERS,
    *semaphores.PEERS,
    *iceoryx.PEERS,
    *vllm_queue.PEERS,
)
