"""What the writer of a storage knows about its objects, besides the table that all share."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING

from memlane.errors import InvalidType, UnknownKey

if TYPE_CHECKING:
    from memlane._native import StoreWriter


class ObjectIndex:
    """Keys, ids and references; the ring tells it which chunks end (it is its `Tenant`)."""

    # Not the storage itself, which refers to the ring: the two would keep each other alive.

    def __init__(self) -> None:
        self.key_index: dict[Hashable, tuple[int, int]] = {}
        self.id_index: dict[int, Hashable] = {}
        self.writer_flag: dict[int, int] = {}
        self.touched: set[int] = set()
        self.may_obstruct = False  # before the first orphan
        self.end: StoreWriter | None = None

    def _open_end(self) -> StoreWriter | None:
        """None once the storage is closed: the ring may be used on without it."""
        return None if self.end is None or self.end.is_closed else self.end

    def has(self, key: Hashable) -> bool:
        try:
            return key in self.key_index
        except TypeError:
            raise InvalidType(f"a key must be hashable, not {type(key).__name__}") from None

    def find(self, key: Hashable) -> tuple[int, int]:
        if not self.has(key):
            raise UnknownKey(f"no object is stored under {key!r}; it may have been evicted")
        return self.key_index[key]

    def add(self, key: Hashable, address: int, number: int) -> None:
        self.key_index[key] = (address, number)
        self.id_index[number] = key

    def release(self, chunk_id: int) -> bool:
        """Evicts an object, unless it is touched or somebody reads it."""
        if chunk_id in self.touched:
            return False
        end = self._open_end()
        if chunk_id in self.id_index and end is not None and not end.evict(chunk_id):
            return False
        self._drop(chunk_id)
        return True

    def obstacle(self, offset: int, nbytes: int) -> int:
        """0 if nobody reads what was cleared there; else the offset behind it."""
        end = self._open_end()
        return 0 if end is None else end.obstacle(offset, nbytes)

    def forget(self, chunk_id: int) -> None:
        """Takes back what a put has done so far; nobody knows the object's address yet."""
        end = self._open_end()
        self.may_obstruct = True
        if end is not None:
            end.take_back(chunk_id)
        self._drop(chunk_id)

    def _drop(self, chunk_id: int) -> None:
        """Can be done again when it was interrupted: `id_index` goes after `key_index`."""
        if chunk_id in self.id_index:
            self.key_index.pop(self.id_index[chunk_id], None)
            del self.id_index[chunk_id]
        self.writer_flag.pop(chunk_id, None)
        self.touched.discard(chunk_id)

    def forget_all(self) -> None:
        """Who was told of an object can read it until its space is wanted."""
        end = self._open_end()
        self.may_obstruct = True
        if end is not None:
            for number in self.id_index:
                end.clear(number)
        self.key_index.clear()
        self.id_index.clear()
        self.writer_flag.clear()
        self.touched.clear()
