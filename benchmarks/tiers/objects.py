"""MB/s of an object tier beside obstore itself, one object for each block, alternating.

    python -m benchmarks.tiers.objects [--mib 128] [--rounds 5] [--url URL] [--option NAME=VALUE]

Without a URL: files of a folder, memory of this process, and moto, which plays S3. None of them is
an object store: they show what a request costs here, and moto only that it works. obstore has as
many threads as the tier has connections; what it loads is copied into the rows, unchecked.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
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
THREADS = 4
Options = dict[str, Any]


@contextmanager
def moto() -> Iterator[tuple[str, Options]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1000):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.02)
        endpoint = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{endpoint}/bucket", method="PUT")
        urllib.request.urlopen(request).close()
        yield (
            "s3://bucket/blocks",
            {
                "endpoint": endpoint,
                "region": "us-east-1",
                "access_key_id": "user",
                "secret_access_key": "secret",
                "client_options": {"allow_http": True},
            },
        )
    finally:
        process.kill()
        process.wait()


class Tier:
    """memlane's."""

    def __init__(self, url: str, rows: Any, options: Options) -> None:
        kind = import_module("memlane.tiers.objects").ObjectTier
        self._tier = kind(url, rows, connections=THREADS, timeout=120, **options)
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


class Client:
    """obstore."""

    def __init__(self, url: str, rows: Any, options: Options) -> None:
        self._obstore = import_module("obstore")
        self._store = import_module("obstore.store").from_url(url, **options)
        self._rows = rows
        self._pool = ThreadPoolExecutor(THREADS)
        self._names: list[str] = []

    def _each(self, work: Callable[[int], None], keys: list[bytes]) -> None:
        self._names = [f"alone/{key.decode().replace(' ', '-')}" for key in keys]
        list(self._pool.map(work, range(len(keys))))

    def store(self, keys: list[bytes]) -> None:
        def work(at: int) -> None:
            self._obstore.put(self._store, self._names[at], bytes(self._rows[at]))

        self._each(work, keys)

    def load(self, keys: list[bytes]) -> None:
        def work(at: int) -> None:
            value = self._obstore.get(self._store, self._names[at]).bytes()
            self._rows[at] = np.frombuffer(value, np.uint8)

        self._each(work, keys)

    def clear(self) -> None:
        self._obstore.delete(self._store, self._names)

    def close(self) -> None:
        self._pool.shutdown()


PEERS: dict[str, Callable[[str, Any, Options], Tier | Client]] = {
    "ObjectTier": Tier,
    "obstore": Client,
}


def run(what: str, url: str, options: Options, row_bytes: int, mib: int, rounds: int) -> None:
    count = (mib << 20) // row_bytes
    rows = np.random.default_rng(1).integers(0, 256, (count, row_bytes), np.uint8)
    seen: dict[str, list[tuple[float, float]]] = {name: [] for name in PEERS}
    peers = {name: make(url, rows, options) for name, make in PEERS.items()}
    for number in range(rounds):
        for name, peer in peers.items():
            keys = [f"{name} {number} {at}".encode() for at in range(count)]
            begun = time.perf_counter()
            peer.store(keys)
            stored = time.perf_counter()
            peer.load(keys)
            ended = time.perf_counter()
            peer.clear()
            seen[name].append((mib / (stored - begun), mib / (ended - stored)))
    for peer in peers.values():
        peer.close()
    medians = {
        name: [statistics.median(column) * 1.048576 for column in zip(*each, strict=True)]
        for name, each in seen.items()
    }
    size = f"{what:6}  {row_bytes >> 10:5} KiB"
    for name, (store, load) in medians.items():
        print(f"{size}  {name:10} store {store:6.0f} MB/s  load {load:6.0f} MB/s")
    ratios = [own / other for own, other in zip(*medians.values(), strict=True)]
    print(f"                   ObjectTier {ratios[0]:.2f} x and {ratios[1]:.2f} x obstore")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=128, help="MiB in each pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--url", help="a store of yours; what it has there is removed")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of obstore, for --url"
    )
    arguments = parser.parse_args()
    needs.package("obstore", "the object tier")
    how = arguments.mib, arguments.rounds
    print(f"{arguments.mib} MiB a pass, {THREADS} connections; {describe()}")
    if arguments.url:
        options = dict(each.partition("=")[::2] for each in arguments.option)
        for row_bytes in ROWS:
            run("yours", arguments.url, options, row_bytes, *how)
        return
    needs.package("moto", "this benchmark's S3")
    with tempfile.TemporaryDirectory() as folder, moto() as (url, options):
        for row_bytes in ROWS:
            run("memory", "memory:///", {}, row_bytes, *how)
            run("files", Path(folder).as_uri(), {}, row_bytes, *how)
            run("moto", url, options, row_bytes, *how)


if __name__ == "__main__":
    main()
