"""vLLM 0.33's own MessageQueue, with and without its opt-in arena for tensors.

The engine's modules are real; their other imports are stubs, as in the tests of the adapters.
`python -m tests.engines.sources` fetches the modules.
"""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.broadcast.channel import Channel, Peer
from benchmarks.broadcast.payloads import Payload

RELEASE = "0.33"
MODULE = "vllm.distributed.device_communicators.shm_broadcast"
SOURCES = Path(__file__).parents[3] / "build/engines" / RELEASE


@cache
def _queues() -> Any:
    import_module("tests.engines.scenario").prepare(RELEASE)
    return import_module(MODULE).MessageQueue


class Default(Channel):
    """With its default options; for a second after each message the readers spin."""

    has_arena = False

    def prepare(self) -> None:
        _queues()

    def open_writer(self) -> object:
        readers = self.setting.readers
        self.queue = _queues()(readers, readers, enable_shm_tensor_arena=self.has_arena)
        return self.queue.export_handle()

    def open_reader(self, rank: int, token: object) -> None:
        self.queue = _queues().create_from_handle(token, rank)
        # The writer's wait_until_ready returns once all readers are in theirs; theirs return later.
        self._ready = threading.Thread(target=self.queue.wait_until_ready)
        self._ready.start()

    def ready(self) -> None:
        self.queue.wait_until_ready()
        for owner in filter(None, (self.queue.buffer, self.queue.tensor_arena)):
            owner.shared_memory.unlink()  # all readers have mapped it; nothing can leak
            owner.is_creator = False

    def send(self, obj: object) -> None:
        self.queue.enqueue(obj)

    def recv(self) -> object:
        self._ready.join()
        return self.queue.dequeue()


class Arena(Default):
    """Tensors are sent in slots that are mapped once, and readers alias them."""

    has_arena = True


def _missing(payload: Payload) -> str | None:
    if find_spec("torch") is None:
        return "torch is not installed"
    return None if SOURCES.exists() else "run `python -m tests.engines.sources` first"


def _missing_arena(payload: Payload) -> str | None:
    return _missing(payload) if payload.is_tensor else "it is for tensors"


PEERS = (
    Peer("vLLM", Default, _missing, sleeps=False),
    Peer("vLLM arena", Arena, _missing_arena, sleeps=False),
)
