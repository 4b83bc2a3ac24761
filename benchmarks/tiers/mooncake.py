"""MB/s of a Mooncake tier beside Mooncake's own client, on one master and TCP, alternating.

    python -m benchmarks.tiers.mooncake [--mib 128] [--rounds 5]

A third process has the memory. Mooncake's client has as many threads as the tier has connections,
each with batches of 4 MiB, and moves bytes from and to registered memory, unchecked; the tier moves
them from and to rows, and checks every byte.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.machine import describe
from benchmarks.tiers.beside import ROWS, Peers, Tier, arguments_of, compare

THREADS = 2
BATCH = 4 << 20
MEMORY = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1])
print(code, flush=True)
sys.stdin.read()
"""


@contextmanager
def master(nbytes: int) -> Iterator[str]:
    """With a process that has memory. Their messages are dropped."""
    spec = find_spec("mooncake")
    binary = Path((spec and spec.origin) or "").with_name("mooncake_master")
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("", 0)) as two:
        port, other = one.getsockname()[1], two.getsockname()[1]
    address = f"127.0.0.1:{port}"
    drop = subprocess.DEVNULL
    options = ["-rpc_address=127.0.0.1", f"-rpc_port={port}", f"-metrics_port={other}"]
    process = subprocess.Popen([str(binary), *options], stdout=drop, stderr=drop)
    try:
        while socket.socket().connect_ex(("127.0.0.1", port)):
            time.sleep(0.01)
        with subprocess.Popen(
            [sys.executable, "-c", MEMORY, address, str(nbytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=drop,
        ) as memory:
            if memory.stdout is None or memory.stdout.readline() != b"0\n":
                raise RuntimeError("Mooncake gives no memory")
            try:
                yield address
            finally:
                memory.kill()
    finally:
        process.kill()
        process.wait()


class Client:
    """Mooncake's, in this process."""

    def __init__(self, address: str, rows: Any) -> None:
        self._store = import_module("mooncake.store").MooncakeDistributedStore()
        code = self._store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address)
        self._rows, self._row_bytes = rows, rows.shape[1]
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(rows))
        if code or self._store.register_buffer(self._address, rows.nbytes):
            raise RuntimeError("Mooncake does not start")
        self._pool = ThreadPoolExecutor(THREADS)

    def _each(self, call: Callable[..., list[int]], keys: list[bytes], right: int) -> None:
        batch = BATCH // self._row_bytes

        def work(at: int) -> None:
            part = [key.decode() for key in keys[at : at + batch]]
            places = [self._address + (at + i) * self._row_bytes for i in range(len(part))]
            if set(call(part, places, [self._row_bytes] * len(part))) != {right}:
                raise RuntimeError("blocks failed")

        list(self._pool.map(work, range(0, len(keys), batch)))

    def store(self, keys: list[bytes]) -> None:
        self._each(self._store.batch_put_from, keys, 0)

    def load(self, keys: list[bytes]) -> None:
        self._each(self._store.batch_get_into, keys, self._row_bytes)

    def clear(self) -> None:
        self._store.remove_all(True)

    def close(self) -> None:
        self._pool.shutdown()
        self._store.unregister_buffer(self._address)
        self._store.close()


def own(address: str, rows: Any) -> Tier:
    kind = import_module("memlane.tiers").MooncakeTier
    return Tier(kind(address, rows, connections=THREADS, timeout=60), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments = arguments_of(parser, 128)
    if find_spec("mooncake") is None:
        sys.exit("the Mooncake tier needs Mooncake: pip install mooncake-transfer-engine-non-cuda")
    os.environ.setdefault("GLOG_minloglevel", "2")
    print(f"{arguments.mib} MiB a pass, {THREADS} connections; {describe()}")
    for row_bytes in ROWS:
        with master((arguments.mib << 20) * 3) as address:
            peers: Peers = {
                "MooncakeTier": partial(own, address),
                "Mooncake": partial(Client, address),
            }
            # The first pass makes connections, and touches memory.
            how = arguments.mib, arguments.rounds
            compare(peers, row_bytes, *how, is_first_counted=False)


if __name__ == "__main__":
    main()
