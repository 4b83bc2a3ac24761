"""The peers, in the order in which tables show them."""

from __future__ import annotations

from benchmarks.store.channel import Peer
from benchmarks.store.peers import lightning, memcpy, memlane_store, ray_store, segments, zeromq

PEERS: tuple[Peer, ...] = (
    *memcpy.PEERS,
    *memlane_store.PEERS,
    *segments.PEERS,
    *lightning.PEERS,
    *ray_store.PEERS,
    *zeromq.PEERS,
)
