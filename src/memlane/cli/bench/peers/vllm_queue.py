"""vLLM's own MessageQueue, where vLLM is installed."""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from typing import Any

from memlane.cli.bench.channel import Channel, Peer


@cache
def _queues() -> Any:
    return import_module("vllm.distributed.device_communicators.shm_broadcast").MessageQueue


class Default(Channel):
    """With its default options; for a second after each message the readers spin."""

    has_arena = False  # of 0.33: tensors lie in slots that are mapped once, and readers alias them

    def prepare(self) -> None:
        _queues()

    def open_writer(self) -> object:
        readers = self.setting.readers
        arena = {"enable_shm_tensor_arena": True} if self.has_arena else {}
        self.queue = _queues()(readers, readers, **arena)
        return self.queue.export_handle()

    def open_reader(self, rank: int, token: object) -> None:
        self.queue = _queues().create_from_handle(token, rank)
        # The writer's wait_until_ready returns once all readers are in theirs; theirs return later.
        self._ready = threading.Thread(target=self.queue.wait_until_ready)
        self._ready.start()

    def ready(self) -> None:
        self.queue.wait_until_ready()
        for owner in filter(None, (self.queue.buffer, getattr(self.queue, "tensor_arena", None))):
            owner.shared_memory.unlink()  # all readers have mapped it; nothing can leak
            owner.is_creator = False

    def send(self, obj: object) -> None:
        self.queue.enqueue(obj)

    def recv(self) -> object:
        self._ready.join()
        return self.queue.dequeue()


PEERS = (Peer("vLLM", Default, package="vllm", sleeps=False),)
