"""MB/s of a Redis tier beside redis-py itself, on one server and a unix socket, alternating.

    python -m benchmarks.tiers.redis [--mib 256] [--rounds 5]

redis-py has hiredis, pipelines of 32 commands, and as many threads as the tier has connections.
What it loads is copied into the rows, unchecked; the tier checks every byte.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
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

    def clear(self) -> None:
        self._client.flushall()

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()


def own(url: str, rows: Any) -> Tier:
    kind = import_module("memlane.tiers").RedisTier
    return Tier(kind(url, rows, connections=THREADS, timeout=60), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments = arguments_of(parser, 256)
    needs.package("redis", "the Redis tier")
    if shutil.which("redis-server") is None:
        sys.exit("this benchmark runs a server of its own: install redis-server")
    print(f"{arguments.mib} MiB a pass, {THREADS} connections; {describe()}")
    with tempfile.TemporaryDirectory() as folder, server(Path(folder)) as url:
        peers: Peers = {"RedisTier": partial(own, url), "redis-py": partial(Client, url)}
        for row_bytes in ROWS:
            compare(peers, row_bytes, arguments.mib, arguments.rounds)


if __name__ == "__main__":
    main()
