"""A tier on a server beside that server's own client: what the benchmarks of both share."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

ROWS = (65536, 1 << 20)


class Peer(Protocol):
    """Whatever stores rows under keys, one each, and loads them again."""

    def store(self, keys: list[bytes]) -> None: ...

    def load(self, keys: list[bytes]) -> None: ...

    def clear(self) -> None:
        """Removes what was stored."""

    def close(self) -> None: ...


Peers = dict[str, Callable[[Any], Peer]]


class Tier:
    """memlane's."""

    def __init__(self, tier: Any, rows: Any) -> None:
        self._tier = tier
        self._ids = np.arange(len(rows))

    def _run(self, begin: Callable[..., Any], keys: list[bytes]) -> None:
        begin(keys, self._ids)
        self._tier.drain(120)
        (done,) = self._tier.poll()
        if not done.ok.all():
            raise RuntimeError(f"blocks failed: {done.error}")

    def store(self, keys: list[bytes]) -> None:
        self._run(self._tier.store, keys)

    def load(self, keys: list[bytes]) -> None:
        self._run(self._tier.load, keys)

    def clear(self) -> None:
        self._tier.clear()

    def close(self) -> None:
        self._tier.close()


def compare(
    peers: Peers,
    row_bytes: int,
    mib: int,
    rounds: int,
    *,
    title: str = "",
    is_first_counted: bool = True,
) -> None:
    """Prints MB/s of each, alternating, medians; memlane's is the first of two."""
    count = (mib << 20) // row_bytes
    rows = np.random.default_rng(1).integers(0, 256, (count, row_bytes), np.uint8)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    opened = {name: make(rows) for name, make in peers.items()}
    for number in range(rounds + (not is_first_counted)):
        for name, peer in opened.items():
            keys = [f"{name} {number} {at}".encode() for at in range(count)]
            begun = time.perf_counter()
            peer.store(keys)
            stored = time.perf_counter()
            peer.load(keys)
            ended = time.perf_counter()
            peer.clear()
            if number or is_first_counted:
                seen[name].append((mib / (stored - begun), mib / (ended - stored)))
    for peer in opened.values():
        peer.close()
    medians = {
        name: [statistics.median(column) * 1.048576 for column in zip(*each, strict=True)]
        for name, each in seen.items()
    }
    size = f"{title:7}{row_bytes >> 10:5} KiB"
    for name, (store, load) in medians.items():
        print(f"{size}  {name:12} store {store:6.0f} MB/s  load {load:6.0f} MB/s")
    own, other = medians
    ratios = [one / two for one, two in zip(*medians.values(), strict=True)]
    print(f"{'':18}{own} {ratios[0]:.2f} x and {ratios[1]:.2f} x {other}")


def arguments_of(parser: argparse.ArgumentParser, mib: int) -> argparse.Namespace:
    """With how much and how often."""
    parser.add_argument("--mib", type=int, default=mib, help="MiB in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()
