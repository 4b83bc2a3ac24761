"""The objects of a group: put once into shared memory, and read there by the workers of each call
that gets them.

An object stays while a call has its `Stored`, until all its workers have answered:
`Stored.__reduce__` adds it to the call that is being pickled. Arrays that a worker keeps hold the
object themselves, as views of a storage do. If only the caller has the `Stored` when the room is
needed, the object's bytes move into it, and are sent with later calls.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import numpy as np

from memlane import (
    ConcurrentUse,
    InvalidType,
    ObjectGone,
    PickleMsgpackSerde,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
    StoreFull,
    StoreStatistics,
)
from memlane._base.deadline import Deadline
from memlane._locks import Lock

if TYPE_CHECKING:
    from memlane import CallTimedOut
    from memlane.workers.answers import Answers
    from memlane.workers.table import Pending, Table

    Place = tuple[int, int]
    Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]

_LARGEST = 2**31 - 16  # bytes of an allocation
_HEADER = 12  # bytes of an allocation before an object, whose arrays are aligned from its start


class Stored:
    """An object of a group's store. A worker that gets it as an argument of a call, or as an item
    of `scatter`, has the object in its place; elsewhere in an argument it has this, and calls
    `get()` before it answers.

    Arrays are read-only and lie in shared memory, as does what was `bytes`, a memoryview; tensors
    are copies. A worker may keep them.

    Attributes:
        key: of the object; None in a worker.
    """

    __slots__ = ("__weakref__", "_id", "_moved", "_place", "_store", "key")

    def __init__(
        self,
        store: WorkersStore | None,
        key: Hashable,
        store_id: str,
        place: Place | None,
        moved: Bytes | None = None,
    ) -> None:
        self._store, self.key = store, key
        self._id, self._place, self._moved = store_id, place, moved

    def get(self) -> Any:
        """Returns the object.

        Raises:
            ObjectGone: in a worker, which has answered the call that had it, and keeps no array
                of it.
            InvalidType: this process is no worker of that group.
            Closed: the group was closed.
        """
        storage = _storages.get(self._id) if self._store is None else self._store._storage
        if storage is None:
            raise InvalidType("this process is no worker of the group that has stored the object")
        while (place := self._place) is not None:
            try:
                return storage.lend(*place)
            except ObjectGone:
                if self._place is not None:  # else it has moved meanwhile
                    raise
        moved = cast("Bytes", self._moved)
        moved.flags.writeable = False
        return storage.ser_de.deserialize_view(moved.data[_HEADER:])

    def __reduce__(self) -> tuple[Any, ...]:
        if self._store is None:
            raise InvalidType("a worker cannot send a Stored: send what its get() returns")
        self._store._note_sent(self)
        place = self._place  # only now: see WorkersStore._move
        return Stored, (None, None, self._id, place, self._moved if place is None else None)

    def __repr__(self) -> str:
        return f"<Stored {self.key!r} at {self._place}>"


class _Storage(SingleWriterShmObjectStorage):
    """Evicts what no `Stored` is there for and no worker reads, and no more than it must. Reads are
    not counted: only some workers get an object."""

    def __init__(self, nbytes: int, world: int, name: str) -> None:
        self.living: WeakValueDictionary[int, Stored] = WeakValueDictionary()  # by id
        self._next: int | None = None  # the id after that of an object that was evicted just now
        ring = SingleWriterShmRingBuffer(nbytes, create=True)
        try:
            super().__init__(
                *(min(nbytes - ring.MD_SIZE, _LARGEST), world, ring, PickleMsgpackSerde),
                unlink_when_complete=True,
                name=name,
            )
        except BaseException:
            ring.close()
            raise

    def default_is_free_check(self, id: int, buf: memoryview) -> bool:
        """Frees one object, and then looks for room again: else all that is free would go, up to
        twice the largest size."""
        if id == self._next or id in self.living:
            self._next = None
            return False
        self._next = (id + 1) % SingleWriterShmRingBuffer.ID_MAX
        return True

    def put_serialized(self, key: Hashable, parts: tuple[Any, int, Any, int]) -> Place:
        """Puts an object as `put` does, without code of a user's, but that of the key."""
        with self.ring_buffer._only_writer("put"):
            self._next = None
            self._must_be_new(key)
            return self._put(key, parts)

    def bytes_at(self, place: Place) -> Bytes:
        """Returns a copy of an object's bytes, behind as many others as an allocation has."""
        pinned = self._pin(*place)
        try:
            data = pinned.data()
            copy = np.empty(_HEADER + len(data), np.uint8)
            copy[_HEADER:] = data
            del data
            return copy
        finally:
            pinned.release()


class WorkersStore:
    """The store of a group: `group.store`, if it was made with `store=` bytes.

    Threads may share it. To a type checker each `Stored` is Any: it stands for its object.
    """

    def __init__(self, nbytes: int, world: int, name: str, table: Table, answers: Answers) -> None:
        self._storage = _Storage(nbytes, world, name)
        self._id = self._storage.ring_buffer.handle()[1]
        self._table, self._answers = table, answers
        self._lock = Lock()  # no code of a user's runs with it, but that of keys
        # The thread that pickles a call, and that call.
        self._sending: tuple[int, Pending] | None = None

    def find(self, key: Hashable) -> Any:
        """Returns the `Stored` of that key; None if it has no object, or that was evicted.

        Raises:
            InvalidType: the key is not hashable.
            Closed: the group was closed.
        """
        storage = self._storage
        storage._check()  # a forked child may have the lock held by nobody
        with self._lock:
            if not storage.is_cached(key):
                return None
            place = storage.key_index[key]
            found = storage.living.get(place[1])
            return found if found is not None else self._new(key, place)

    def put(self, key: Hashable, value: Any, timeout: float | None = None) -> Any:
        """Copies `value` into shared memory, once for all workers, and returns its `Stored`. Evicts
        the oldest objects; waits for calls that have these. One whose `Stored` you keep moves into
        it, and is sent with later calls. If a signal handler raises, `find` tells whether it was
        stored.

        Args:
            key: by which `find` finds it.
            value: arrays, tensors and plain types are copied as they are, others are pickled.
            timeout: in seconds; None waits as long as the calls take.

        Raises:
            StoreFull: a MemoryError; a worker, which is named, keeps an array of the oldest object.
            CallTimedOut: a call that has it was not answered in time.
            InvalidArgument: the key has an object, or this one is larger than the store.
            InvalidType: it cannot be pickled.
            Closed: the group was closed.
        """
        deadline = Deadline(timeout)
        parts = self._storage._serialized(value)
        while True:
            found = self._attempt(key, parts)
            if isinstance(found, Stored):
                return found
            if not self._answers.wait(found.is_complete, deadline) and deadline.has_passed():
                raise self._late(key, found, timeout)
            del found  # its error's traceback may have the object

    async def aput(self, key: Hashable, value: Any, timeout: float | None = None) -> Any:
        """Is `put` for asyncio: other tasks run while it waits, for at most `timeout` seconds.
        Raises as `put`.
        """
        deadline, loops = Deadline(timeout), self._answers.loops
        parts = self._storage._serialized(value)
        while True:
            found = self._attempt(key, parts)
            if isinstance(found, Stored):
                return found
            if not await loops.wait(found.is_complete, deadline) and deadline.has_passed():
                raise await loops.beside(partial(self._late, key, found, timeout))
            del found  # as above

    def _attempt(self, key: Hashable, parts: tuple[Any, int, Any, int]) -> Stored | Pending:
        """Returns the call to wait for if there is no room."""
        if self._lock.is_mine():
            raise ConcurrentUse("this call is made in the middle of another one of this store")
        storage = self._storage
        storage._check()
        with self._lock:
            while True:
                try:
                    place = storage.put_serialized(key, parts)
                except StoreFull as error:
                    oldest = storage.ring_buffer.monotonic_id_start
                    kept = storage.living.get(oldest)
                    if kept is None or error.need > storage.ring_buffer.data_buffer_size:
                        raise
                    if (call := self._move(oldest, kept)) is not None:
                        return call
                else:
                    stored = self._new(key, place)
                    storage.drop_reference(key)
                    return stored

    def _new(self, key: Hashable, place: Place) -> Stored:
        stored = self._storage.living[place[1]] = Stored(self, key, self._id, place)
        return stored

    def _move(self, number: int, kept: Stored) -> Pending | None:
        """Moves an object out of the store, or returns a call that has it.

        Another thread may be sending it. That notes the call first, and then looks for the place;
        here the place is taken first, and then the calls are looked at.
        """
        call, place = self._table.owing(kept), kept._place
        if call is None and place is not None:
            kept._moved = self._storage.bytes_at(place)
            kept._place = None
            call = self._table.owing(kept)
            if call is not None:
                kept._place = place
        if call is None:
            del self._storage.living[number]
        return call

    def _late(self, key: Hashable, call: Pending, timeout: float | None) -> CallTimedOut:
        text = f"no room for {key!r}: {call.name}() has the oldest object"
        return self._answers.late(text, [*call.missing], timeout)

    def statistics(self) -> StoreStatistics:
        """Returns the counters of the store. Raises `Closed` if the group was closed."""
        return self._storage.statistics()

    def _begin_to_send(self, call: Pending) -> None:
        """Keeps what this thread pickles from now on until the call is answered."""
        if call.stored is None:
            call.stored = {}
        self._sending = threading.get_ident(), call

    def _note_sent(self, stored: Stored) -> None:
        thread, call = self._sending or (0, None)
        if call is None or thread != threading.get_ident():
            raise InvalidType("a Stored is sent in calls of its own group only, and not copied")
        if call.stored is not None:  # else all its workers have died
            call.stored[id(stored)] = stored

    def _close(self) -> None:
        """Frees the memory. Idempotent."""
        self._storage.close()


# Of the groups whose worker this process is, by the names of the segments.
_storages: dict[str, SingleWriterShmObjectStorage] = {}


def attach(handle: ShmObjectStorageHandle | None) -> None:
    """Attaches to the store of this worker's group, if it has one."""
    if handle is not None:
        name = handle.ring_buffer_handle[1]
        _storages[name] = SingleWriterShmObjectStorage.create_from_handle(handle)


def detach(handle: ShmObjectStorageHandle | None) -> None:
    """Closes it."""
    if handle is not None:
        _storages.pop(handle.ring_buffer_handle[1]).close()


def fetched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The arguments of a call, with objects in the place of each `Stored`."""
    if not _storages:
        return args, kwargs
    args = [one.get() if type(one) is Stored else one for one in args]
    return args, {k: one.get() if type(one) is Stored else one for k, one in kwargs.items()}
