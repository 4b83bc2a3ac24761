"""One `multiprocessing.shared_memory` segment per object: a pickle, and its arrays out of band.

Segments are unlinked outside the measured time. Every segment inevitably has new pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from benchmarks.store.channel import Channel, Peer
from benchmarks.store.payloads import to_arrays, to_tensors
from memlane.cli.bench import frames


class Segments(Channel):
    def prepare(self) -> None:
        resource_tracker.ensure_running()  # one for all processes: it counts by name
        self._count = 0
        self._is_tensors = self.setting.payload.name == "tensors"
        self._open: SharedMemory | None = None

    def open_writer(self) -> object:
        return None

    def open_reader(self, rank: int, token: Any) -> None:
        return

    def put(self, obj: Any) -> Any:
        encoded = frames.encode(to_arrays(obj) if self._is_tensors else obj)
        name = f"{self.setting.name}_{self._count}"
        self._count += 1
        segment = SharedMemory(name, create=True, size=encoded.room)
        frames.write(memoryview(segment.buf or b""), encoded)
        segment.close()
        return name

    def _read(self, place: Any, copy: bool) -> Any:
        self._open = SharedMemory(place)
        obj = frames.read(memoryview(self._open.buf or b""), copy=copy)
        return to_tensors(obj) if self._is_tensors else obj

    def get(self, place: Any) -> Any:
        return self._read(place, copy=True)

    def view(self, place: Any) -> AbstractContextManager[Any]:
        return self._view(place)

    @contextmanager
    def _view(self, place: Any) -> Iterator[Any]:
        yield self._read(place, copy=False)

    def release(self) -> None:
        if self._open is not None:
            self._open.close()

    def forget(self, places: Sequence[Any]) -> None:
        for place in places:
            segment = SharedMemory(place)
            segment.unlink()
            segment.close()


PEERS = (Peer("shared_memory", Segments),)
