"""iceoryx2's Python binding: the publisher waits for slow subscribers; polled, or woken by events.

The pickle and its out-of-band buffers are written into the loaned sample. Readers copy them out,
or alias the sample until they release it (view).
"""

from __future__ import annotations

import ctypes
import os
from importlib import import_module
from typing import Any

import numpy as np

from memlane.cli.bench import frames
from memlane.cli.bench.channel import SLACK, Channel, Peer, only_arrays

_MAX_PORTS = 16


class Polling(Channel):
    """Readers poll for samples, and yield the core between two polls."""

    copies = True

    def _service(self) -> Any:
        self._iox = iox = import_module("iceoryx2")
        iox.set_log_level(iox.LogLevel.Fatal)
        config = iox.config.default()
        config.global_cfg.prefix = iox.FileName.new(self.setting.prefix)
        config.global_cfg.root_path = iox.Path.new(str(self.setting.folder))
        self._node = iox.NodeBuilder.new().config(config).create(iox.ServiceType.Ipc)
        return (
            self._node.service_builder(iox.ServiceName.new(self.setting.name))
            .publish_subscribe(iox.Slice[ctypes.c_uint8])
            .max_publishers(1)
            .max_subscribers(_MAX_PORTS)
            .max_nodes(2 * _MAX_PORTS)
            .history_size(0)
            .subscriber_max_buffer_size(self.setting.chunks)
            .enable_safe_overflow(False)
            .open_or_create()
        )

    def open_writer(self) -> object:
        service = self._service()
        self._publisher = (
            service.publisher_builder()
            .initial_max_slice_len(self.setting.payload.bytes + SLACK)
            .backpressure_strategy(self._iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        return None

    def open_reader(self, rank: int, token: object) -> None:
        self._subscriber = (
            self._service().subscriber_builder().buffer_size(self.setting.chunks).create()
        )

    def ready(self) -> None:
        self._publisher.update_connections()

    def send(self, obj: object) -> None:
        encoded = frames.encode(obj)
        room = encoded.room
        sample = self._publisher.loan_slice_uninit(room)
        frames.write(self._memory(sample.payload_ptr, room), encoded)
        sample.assume_init().send()

    def _next(self) -> Any:
        while (sample := self._subscriber.receive()) is None:
            os.sched_yield()
        return sample

    def recv(self) -> object:
        self._sample = sample = self._next()
        payload = sample.payload()
        obj = frames.read(self._memory(payload.as_ptr(), payload.len()), self.copies)
        if self.copies:
            sample.delete()
        return obj

    @staticmethod
    def _memory(address: int, size: int) -> memoryview:
        # Through numpy, because bytes cannot be assigned to slices of a ctypes view.
        memory = memoryview((ctypes.c_uint8 * size).from_address(address))
        return np.frombuffer(memory, np.uint8).data


class Events(Polling):
    """Readers sleep until the writer notifies them."""

    def _event(self) -> Any:
        name = self._iox.ServiceName.new(self.setting.name + "-event")
        builder = self._node.service_builder(name).event()
        return builder.max_listeners(_MAX_PORTS).max_nodes(2 * _MAX_PORTS).open_or_create()

    def open_writer(self) -> object:
        super().open_writer()
        self._notifier = self._event().notifier_builder().create()
        return None

    def open_reader(self, rank: int, token: object) -> None:
        super().open_reader(rank, token)
        self._listener = self._event().listener_builder().create()

    def send(self, obj: object) -> None:
        super().send(obj)
        self._notifier.notify()

    def _next(self) -> Any:
        while (sample := self._subscriber.receive()) is None:
            self._listener.blocking_wait()
        return sample


class EventsView(Events):
    """The object aliases the sample."""

    copies = False

    def release(self) -> None:
        self._sample.delete()


PEERS = (
    Peer("iceoryx2 polling", Polling, "iceoryx2", sleeps=False),
    Peer("iceoryx2 events", Events, "iceoryx2"),
    Peer("iceoryx2 view", EventsView, "iceoryx2", only_arrays, is_view=True),
)
