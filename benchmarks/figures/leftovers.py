"""Counts what stays in /dev/shm after kill -9 of everybody at a random moment, a thousand times.

As after the kernel's out-of-memory killer or the end of a container's processes: writer, reader and
their helpers (Python's resource tracker among them) die at once. Each kill comes between the start
and half as long after the first message as that took. Needs a /dev/shm that is empty, and fills it.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from benchmarks.broadcast.peers import vllm_stubbed
from benchmarks.command import say
from benchmarks.figures.victims import Victims
from memlane import SingleWriterShmObjectStorage, SingleWriterShmRingBuffer
from memlane.cli.bench.channel import DICT, SLACK, Channel, Setting
from memlane.cli.bench.peers import iceoryx
from memlane.cli.bench.peers.memlane_queue import Copy
from memlane.cli.bench.processes import SHM, Workspace

KILLS = 1000
TRIES = 5
STORE_BYTES = 64 << 20


class VllmAsShipped(vllm_stubbed.Default):
    """Without the benchmarks' own removal of its names."""

    def ready(self) -> None:
        self.queue.wait_until_ready()


class Shared(Channel):
    """Python's own SharedMemory of 1 MiB, created by one process and attached by another."""

    def open_writer(self) -> object:
        self._memory = SharedMemory(create=True, size=SLACK * 16)
        return self._memory.name

    def open_reader(self, rank: int, token: object) -> None:
        self._memory = SharedMemory(str(token))

    def send(self, obj: object) -> None:
        return

    def recv(self) -> object:
        return None


class Store(Channel):
    """memlane's object store, with one object in it."""

    def open_writer(self) -> object:
        ring = SingleWriterShmRingBuffer(STORE_BYTES, create=True)
        self._storage = SingleWriterShmObjectStorage(1 << 20, 1, ring)
        return self._storage.handle()

    def open_reader(self, rank: int, token: Any) -> None:
        self._storage = SingleWriterShmObjectStorage.create_from_handle(token)

    def send(self, obj: object) -> None:
        self._storage.put("step", obj)

    def recv(self) -> object:
        return None


SUBJECTS: dict[str, type[Channel]] = {
    "memlane queue": Copy,
    "memlane object store": Store,
    "vLLM 0.33 queue": VllmAsShipped,
    "SharedMemory": Shared,
    "iceoryx2": iceoryx.Events,
}


def _left() -> tuple[int, int]:
    """Files in /dev/shm, and the bytes that they take."""
    files, taken = 0, 0
    for folder, _, names in os.walk(SHM):
        for name in names:
            files += 1
            taken += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return files, taken


def _kill(make: Callable[[], Channel], after: float | None) -> float:
    """Kills after so many seconds; None: once all are ready. Returns how long that took."""
    started = time.monotonic()
    victims = Victims(make)
    try:
        if after is None:
            victims.next("ready")
        else:
            time.sleep(after)
        return time.monotonic() - started
    finally:
        victims.kill_all()


def measure() -> dict[str, Any]:
    if any(SHM.iterdir()):
        raise SystemExit("/dev/shm is not empty; run this by tests/own_shm.sh, as `make figures`")
    draw = random.Random(1)
    found: dict[str, Any] = {}
    for name, channel in SUBJECTS.items():
        with Workspace() as workspace:

            def make(channel: type[Channel] = channel, workspace: Workspace = workspace) -> Channel:
                place = workspace.folder, workspace.prefix, workspace.new_name()
                return channel(Setting(DICT, 1, *place))

            if channel is VllmAsShipped:
                make().prepare()  # imports it, once for all
            ready = statistics.median(_kill(make, None) for _ in range(TRIES))
            samples = []
            for _ in range(KILLS):
                _kill(make, draw.uniform(0.0, 1.5 * ready))
                samples.append(_left())
            say(f"  {name}: {samples[-1][0]} files, {samples[-1][1] / 2**20:.1f} MiB")
            found[name] = {"files": [s[0] for s in samples], "bytes": [s[1] for s in samples]}
        for path in SHM.iterdir():
            Workspace.remove(path)
    return {"kills": KILLS, "subjects": found}
