"""MB/s of an object tier beside obstore itself, one object for each block, alternating.

    python -m benchmarks.tiers.objects [--mib 128] [--rounds 5] [--url URL] [--option NAME=VALUE]

Without a URL: files of a folder, memory of this process, and moto, which plays S3. None of them is
an object store: they show what a request costs here, and moto only that it works. obstore has as
many threads as the tier has connections; what it loads is copied into the rows, unchecked.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import needs
from benchmarks.machine import describe
from benchmarks.tiers.beside import ROWS, Peers, Tier, arguments_of, compare

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


class Client:
    """obstore."""

    def __init__(self, url: str, options: Options, rows: Any) -> None:
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


def own(url: str, options: Options, rows: Any) -> Tier:
    kind = import_module("memlane.tiers").ObjectTier
    return Tier(kind(url, rows, connections=THREADS, timeout=120, **options), rows)


def run(what: str, url: str, options: Options, row_bytes: int, mib: int, rounds: int) -> None:
    peers: Peers = {
        "ObjectTier": partial(own, url, options),
        "obstore": partial(Client, url, options),
    }
    compare(peers, row_bytes, mib, rounds, title=what)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a store of yours; what it has there is removed")
    parser.add_argument(
        "--option", action="append", default=[], metavar="NAME=VALUE", help="of obstore, for --url"
    )
    arguments = arguments_of(parser, 128)
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
