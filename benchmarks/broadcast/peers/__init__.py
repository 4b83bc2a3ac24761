"""The peers, in the order in which tables show them."""

from __future__ import annotations

from benchmarks.broadcast.peers import fifo, known_design, semaphores, vllm_stubbed
from memlane.cli.bench.channel import Peer
from memlane.cli.bench.peers import iceoryx, memlane_queue, pipe, zeromq

PEERS: tuple[Peer, ...] = (
    *memlane_queue.PEERS,
    *known_design.PEERS,
    *pipe.PEERS,
    *zeromq.PEERS,
    *fifo.PEERS,
    *semaphores.PEERS,
    *iceoryx.PEERS,
    *vllm_stubbed.PEERS,
)
