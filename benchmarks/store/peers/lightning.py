"""LMDB in /dev/shm: a memory-mapped B-tree, written without waiting for a disk.

Measured twice: with the pickle and each of its arrays under a separate key, so that nothing is
joined in memory before it is copied; and with memlane's own serde, so that views differ only by the
store. Both read in a transaction that ends with the block, from buffers of the map itself.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.store.channel import Channel, Peer
from benchmarks.store.payloads import to_arrays, to_tensors
from memlane import MsgpackSerde
from memlane.cli.bench import frames

HAS_LMDB = find_spec("lmdb") is not None


class Parts(Channel):
    def prepare(self) -> None:
        self._is_tensors = self.setting.payload.name == "tensors"
        self._count = 0
        self._folder = Path(tempfile.mkdtemp(prefix=self.setting.name + "_", dir="/dev/shm"))

    def _open(self) -> Any:
        import lmdb

        payload = self.setting.payload
        return lmdb.open(
            str(self._folder),
            map_size=4 * payload.slots * (payload.bytes + 65536) + (16 << 20),
            writemap=True,
            sync=False,
            metasync=False,
            readahead=False,
            max_readers=126,
        )

    def open_writer(self) -> object:
        self._env = self._open()
        return None

    def open_reader(self, rank: int, token: Any) -> None:
        self._env = self._open()

    def _next_key(self) -> bytes:
        """There are as many keys as slots, so later objects replace older ones."""
        self._count += 1
        return b"%d" % (self._count % self.setting.payload.slots)

    def put(self, obj: Any) -> Any:
        encoded = frames.encode(to_arrays(obj) if self._is_tensors else obj)
        key = self._next_key()
        with self._env.begin(write=True) as transaction:
            transaction.put(key, encoded.head)
            for number, buffer in enumerate(encoded.buffers):
                transaction.put(b"%b.%d" % (key, number), buffer)
        return key, len(encoded.buffers)

    def _read(self, transaction: Any, place: Any, copy: bool) -> Any:
        key, count = place
        buffers = (transaction.get(b"%b.%d" % (key, number)) for number in range(count))
        obj = pickle.loads(
            transaction.get(key), buffers=map(bytearray, buffers) if copy else buffers
        )
        return to_tensors(obj) if self._is_tensors else obj

    def get(self, place: Any) -> Any:
        with self._env.begin(buffers=True) as transaction:
            return self._read(transaction, place, copy=True)

    def view(self, place: Any) -> AbstractContextManager[Any]:
        return self._view(place)

    @contextmanager
    def _view(self, place: Any) -> Iterator[Any]:
        with self._env.begin(buffers=True) as transaction:
            yield self._read(transaction, place, copy=False)

    def close(self) -> None:
        self._env.close()


class SameSerde(Parts):
    def prepare(self) -> None:
        super().prepare()
        self._serde = MsgpackSerde()

    def put(self, obj: Any) -> Any:
        data, _, metadata, _ = self._serde.serialize(obj)
        key = self._next_key()
        with self._env.begin(write=True) as transaction:
            transaction.put(key, b"".join([metadata, *data]))
        return key

    def _read(self, transaction: Any, place: Any, copy: bool) -> Any:
        decode = self._serde.deserialize if copy else self._serde.deserialize_view
        return decode(transaction.get(place))


def _missing() -> str | None:
    return None if HAS_LMDB else "lmdb is not installed (pip install 'memlane[bench]')"


PEERS = (Peer("lmdb", Parts, _missing), Peer("lmdb, our serde", SameSerde, _missing))
