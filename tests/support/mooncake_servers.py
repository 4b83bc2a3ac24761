"""Real Mooncake masters for tests, on ports of their own; clients bring the memory."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Self

from memlane._base.deadline import Deadline
from tests.support.leaks import LASTING, children_of
from tests.support.missing import needs
from tests.support.servers import Server, free_port
from tests.support.waiting import PATIENCE


def _refusal() -> str:
    if find_spec("mooncake") is None:
        return needs("mooncake")
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return needs("libibverbs1")
    return ""


REFUSAL = _refusal()
_SPEC = find_spec("mooncake")
_FOLDER = Path(_SPEC.origin).parent if _SPEC and _SPEC.origin else None


class MooncakeMaster(Server):
    """One that logs to a file; it can be stopped, killed and started again."""

    def __init__(self, log: Path, *options: str) -> None:
        self._log, self._options = log, options
        super().__init__()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def launch(self) -> "subprocess.Popen[bytes]":
        assert _FOLDER is not None, REFUSAL
        command = [
            *(str(_FOLDER / "mooncake_master"), "-rpc_address=127.0.0.1", f"-rpc_port={self.port}"),
            *("-rpc_thread_num=2", "-metrics_host=127.0.0.1", f"-metrics_port={free_port()}"),
            *("-default_kv_lease_ttl=500", "-client_ttl=2", *self._options),
        ]
        with self._log.open("ab") as output:
            return subprocess.Popen(command, stdout=output, stderr=output)


CLIENT = """
import sys
import numpy as np
from memlane.tiers.remote.mooncake import MooncakeTier
with MooncakeTier(sys.argv[1], np.zeros((1, 8), np.uint8), segment=sys.argv[2], timeout=180):
    print("ready", flush=True)
    sys.stdin.read()
"""


@contextmanager
def memory(master: MooncakeMaster, size: str) -> Iterator["subprocess.Popen[str]"]:
    """Another process, that gives the store memory."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, master.address, size], stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            kill_with_client(process)


def kill_with_client(process: "subprocess.Popen[str]") -> None:
    """The memory is gone without a word."""
    if process.poll() is None:
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait()


@contextmanager
def lasting_master(log: Path) -> Iterator[MooncakeMaster]:
    """One for several tests, with memory."""
    with MooncakeMaster(log) as master, memory(master, "1GiB") as process:
        mine = {master.pid, process.pid}
        LASTING.update(mine)
        try:
            yield master
        finally:
            LASTING.difference_update(mine)


class Store:
    """The contents of one, seen without a tier."""

    def __init__(self, master: MooncakeMaster) -> None:
        from memlane.tiers.remote import mooncake

        settings = {
            "master": master.address,
            "segment": 0,
            "connections": 1,
            "host": None,
            "metadata": "P2PHANDSHAKE",
            "protocol": "tcp",
            "device": "",
        }
        self._client = mooncake._Client(settings, PATIENCE, None)
        self._connection = mooncake._Connection(self._client, Deadline(PATIENCE))

    def has(self, name: bytes) -> bool:
        return self._connection.ask([name], Deadline(PATIENCE))[0]

    def read(self, name: bytes, size: int) -> bytes:
        into = memoryview(bytearray(size))
        found = self._connection.get([name], [into], Deadline(PATIENCE))
        assert found == [size]
        return bytes(into)

    def write(self, name: bytes, value: bytes) -> None:
        """Whatever there was."""
        self._connection.remove([name], Deadline(PATIENCE))
        done = self._connection.put(
            [name], [(value[:8], memoryview(value[8:]))], Deadline(PATIENCE)
        )
        assert done == [None]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._client.close()
