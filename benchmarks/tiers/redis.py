"""MB/s of a Redis tier beside redis-py itself, on one server and a unix socket, alternating.

    python -m benchmarks.tiers.redis [--mib 256] [--rounds 5]

redis-py has hiredis, pipelines of 32 commands, and as many threads as the tier has connections.
What it loads is copied into the rows, unchecked; the tier checks every byte.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import needs
from benchmarks.machine import describe

ROWS = (65536, 1 << 20)
THREADS = 2
PIPELINE = 32


@contextmanager
def server(folder: Path) -> Iterator[str]:
    path = folder / "redis.sock"
    command = ["redis-server", "--port", "0", "--unixsocket", str(path), "--save", ""]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        while not path.exists():
            time.sleep(0.01)
        yield f"unix://{path}"
    finally:
        process.kill()
        process.wait()


class Tier:
    """memlane's."""

    def __init__(self, url: str, rows: Any) -> None:
        kind = import_module("memlane.tiers.redis").RedisTier
        self._tier = kind(url, rows, connections=THREADS, timeout=60)
        self._ids = np.arange(len(rows))

    def _run(self, begin: Callable[..., Any], keys: list[bytes]) -> None:
        begin(keys, self._ids)
        self._tier.drain(60)
        (done,) = self._tier.poll()
        if not done.ok.all():
            raise RuntimeError(f"blocks failed: {done.error}")

    def store(self, keys: list[bytes]) -> None:
        self._run(self._tier.store, keys)

    def load(self, keys: list[bytes]) -> None:
        self._run(self._tier.load, keys)

    def close(self) -> None:
        self._tier.close()


class Client:
    """redis-py."""

    def __init__(self, url: str, rows: Any) -> None:
        self._client = import_module("redis").Redis.from_url(url)
        self._rows = rows
        self._pool = ThreadPoolExecutor(THREADS)

    def _each(self, work: Callable[[range], None], count: int) -> None:
        parts = [range(at, min(count, at + PIPELINE)) for at in range(0, count, PIPELINE)]
        list(self._pool.map(work, parts))

    def store(self, keys: list[bytes]) -> None:
        def work(part: range) -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for at in part:
                    pipe.set(keys[at], memoryview(self._rows[at]))
                pipe.execute()

        self._each(work, len(keys))

    def load(self, keys: list[bytes]) -> None:
        def work(part: range) -> None:
            with self._client.pipeline(transaction=False) as pipe:
                for at in part:
                    pipe.get(keys[at])
                for at, value in zip(part, pipe.execute(), strict=True):
                    self._rows[at] = np.frombuffer(value, np.uint8)

        self._each(work, len(keys))

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()


PEERS: dict[str, Callable[[str, Any], Tier | Client]] = {"RedisTier": Tier, "redis-py": Client}


def run(row_bytes: int, mib: int, rounds: int) -> None:
    count = (mib << 20) // row_bytes
    rows = np.random.default_rng(1).integers(0, 256, (count, row_bytes), np.uint8)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in PEERS}
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as url:
        peers = {name: make(url, rows) for name, make in PEERS.items()}
        for number in range(rounds):
            for name, peer in peers.items():
                keys = [f"{name} {number} {at}".encode() for at in range(count)]
                import_module("redis").Redis.from_url(url).flushall()
                begun = time.perf_counter()
                peer.store(keys)
                stored = time.perf_counter()
                peer.load(keys)
                ended = time.perf_counter()
                seen[name].append((mib / (stored - begun), mib / (ended - stored)))
        for peer in peers.values():
            peer.close()
    medians = {
        name: [statistics.median(column) * 1.048576 for column in zip(*each, strict=True)]
        for name, each in seen.items()
    }
    for name, (store, load) in medians.items():
        print(f"{row_bytes >> 10:5} KiB  {name:10} store {store:6.0f} MB/s  load {load:6.0f} MB/s")
    ratios = [own / other for own, other in zip(*medians.values(), strict=True)]
    print(f"           RedisTier {ratios[0]:.2f} x and {ratios[1]:.2f} x redis-py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=256, help="MiB in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    needs.package("redis", "the Redis tier")
    if shutil.which("redis-server") is None:
        sys.exit("this benchmark runs a server of its own: install redis-server")
    print(f"{arguments.mib} MiB a pass, {THREADS} connections; {describe()}")
    for row_bytes in ROWS:
        run(row_bytes, arguments.mib, arguments.rounds)


if __name__ == "__main__":
    main()
