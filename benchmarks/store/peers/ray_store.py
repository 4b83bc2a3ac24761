"""Ray's object store: `ray.put`, and `ray.get` in actors, which returns arrays in shared memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from benchmarks.store.channel import Ask, Channel, Peer, Setting
from benchmarks.store.payloads import MIB, to_arrays, to_tensors

WORKERS_FIRST_WORD = 120.0  # seconds; a cluster starts several processes with many imports


class Ray(Channel):
    has_get = False

    def open_writer(self) -> object:
        # No statistics leave the machine. No other process joins the cluster: no authentication.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_AUTH_MODE"] = "disabled"
        import ray

        payload = self.setting.payload
        ray.init(
            num_cpus=self.setting.readers,
            include_dashboard=False,
            object_store_memory=max(256 * MIB, 2 * payload.slots * (payload.bytes + MIB)),
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(self.setting.folder / "ray"),
        )
        self._ray = ray
        self._is_tensors = payload.name == "tensors"
        return None

    def start_readers(self) -> Ask:
        ray = self._ray
        setting = self.setting

        class Actor:
            def __init__(self) -> None:
                from benchmarks.store.worker import Reader

                channel = RayReader(setting)
                channel.open_reader(0, None)
                self._reader = Reader(channel)

            def call(self, order: str, arguments: list[Any]) -> Any:
                return getattr(self._reader, order)(*arguments)

        actors = [ray.remote(Actor).options(num_cpus=1).remote() for _ in range(setting.readers)]

        def ask(order: str, *arguments: Any) -> list[Any]:
            # Ray resolves only top-level arguments, so references in a sequence stay references.
            answers: list[Any] = ray.get([actor.call.remote(order, arguments) for actor in actors])
            return answers

        return ask

    def put(self, obj: Any) -> Any:
        return self._ray.put(to_arrays(obj) if self._is_tensors else obj)

    def forget(self, places: Sequence[Any]) -> None:
        return  # dropping the list drops the references

    def close(self) -> None:
        self._ray.shutdown()


class RayReader(Ray):
    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        import ray

        self._ray = ray
        self._is_tensors = setting.payload.name == "tensors"

    def open_reader(self, rank: int, token: Any) -> None:
        return

    def view(self, place: Any) -> AbstractContextManager[Any]:
        return self._view(place)

    @contextmanager
    def _view(self, place: Any) -> Iterator[Any]:
        obj = self._ray.get(place)
        yield to_tensors(obj) if self._is_tensors else obj


def _missing() -> str | None:
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed (pip install 'memlane[bench]')"
    return None


PEERS = (Peer("ray", Ray, _missing, open_seconds=WORKERS_FIRST_WORD),)
