"""faster-fifo: a byte queue with a process-shared mutex, one per reader; pickled once."""

from __future__ import annotations

import pickle
from importlib import import_module
from typing import Any

from memlane.cli.bench.channel import MIB, SLACK, Channel, Peer, Setting

# Capacity of each reader's queue: this, or two messages if that is more.
QUEUE_BYTES = 32 * MIB


def _as_it_is(data: bytes) -> bytes:
    return data


class Fifos(Channel):
    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._bytes = max(QUEUE_BYTES, 2 * (setting.payload.bytes + SLACK))

    @property
    def warm_up(self) -> int:
        return 2 + self._bytes // max(self.setting.payload.bytes, SLACK)

    def prepare(self) -> None:
        queue: Any = import_module("faster_fifo").Queue
        self._queues = [
            queue(max_size_bytes=self._bytes, loads=pickle.loads, dumps=_as_it_is)
            for _ in range(self.setting.readers)
        ]

    def open_reader(self, rank: int, token: object) -> None:
        self._queue = self._queues[rank]

    def send(self, obj: object) -> None:
        data = pickle.dumps(obj, protocol=5)
        for queue in self._queues:
            queue.put(data)

    def recv(self) -> object:
        return self._queue.get()


PEERS = (Peer("faster-fifo", Fifos, "faster_fifo"),)
