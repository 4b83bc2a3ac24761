"""The objects of a group: put once into shared memory, and read there by the workers of each call
that gets them.

An object stays while a call has its `Stored`, until all its workers have answered:
`Stored.__reduce__` adds it to the call that is being pickled. Arrays that a worker keeps hold the
object themselves, as views of a storage do. If only the caller has the `Stored` when the room is
needed, the object moves into it, and is sent with later calls.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

from memlane import (
    ConcurrentUse,
    InvalidType,
    PickleMsgpackSerde,
    ShmObjectStorageHandle,
    SingleWriterShmObjectStorage,
    SingleWriterShmRingBuffer,
    StoreFull,
    StoreStatistics,
)
from memlane._base.arguments import integer_from
from memlane._base.deadline import Deadline
from memlane._locks import Lock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from memlane import CallTimedOut
    from memlane.workers.awaiting import Loops
    from memlane.workers.table import Pending, Table

_LARGEST = 2**31 - 16  # bytes of an allocation


class Stored:
    """An object of a group's store. A worker that gets it as an argument of a call, or as an item
    of `scatter`, has the object in its place; elsewhere in an argument it has this, and calls
    `get()` before it answers.

    Arrays are read-only and lie in shared memory, as does what was `bytes`, a memoryview; tensors
    are copies. A worker may keep them.

    Attributes:
        key: of the object; None in a worker.
    """

    __slots__ = ("__weakref__", "_place", "_store", "_value", "key")

    def __init__(
        self,
        store: WorkersStore | None,
        key: Hashable,
        place: tuple[int, int] | None,
        value: Any = None,
    ) -> None:
        self._store, self.key, self._place, self._value = store, key, place, value

    def get(self) -> Any:
        """Returns the object.

        Raises:
            ObjectGone: in a worker, which has answered the call that had it, and keeps no array
                of it.
            Closed: the group was closed.
        """
        if self._store is not None:
            return self._store._get(self)
        return self._value if self._place is None else _storages[-1].lend(*self._place)

    def __reduce__(self) -> tuple[Any, ...]:
        if self._store is None:
            raise InvalidType("a worker cannot send a Stored: send what its get() returns")
        with self._store._sends(self):
            return Stored, (None, None, self._place, self._value)

    def __repr__(self) -> str:
        return f"<Stored {self.key!r} at {self._place}>"


class _Storage(SingleWriterShmObjectStorage):
    """Evicts what no `Stored` is there for, and no worker reads. Reads are not counted: only some
    workers get an object."""

    def __init__(self, nbytes: int, world: int, name: str) -> None:
        self.living: WeakValueDictionary[int, Stored] = WeakValueDictionary()  # by id
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
        return id not in self.living


class Waiting(Protocol):
    """The waits of a group for its workers' answers."""

    @property
    def loops(self) -> Loops: ...
    def wait(self, is_done: Callable[[], bool], deadline: Deadline) -> bool: ...
    def late(self, text: str, ranks: Iterable[int], timeout: float | None) -> CallTimedOut: ...


class WorkersStore:
    """The store of a group: `group.store`, if it was made with `store=` bytes.

    Threads may share it.
    """

    def __init__(self, nbytes: int, world: int, name: str, table: Table, answers: Waiting) -> None:
        nbytes = integer_from("store", nbytes, 1024)
        self._storage = _Storage(nbytes, world, name)
        self._table, self._answers = table, answers
        self._lock = Lock()
        self._sending: list[Stored] | None = None  # of the call that is being sent

    def find(self, key: Hashable) -> Stored | None:
        """Returns the object that is stored by that key; None if there is none, or it was evicted.

        Raises:
            InvalidType: the key is not hashable.
            Closed: the group was closed.
        """
        storage = self._storage
        with self._lock:
            if not storage.is_cached(key):
                return None
            place = storage.key_index[key]
            found = storage.living.get(place[1])
            if found is None:
                found = storage.living[place[1]] = Stored(self, key, place)
            return found

    def put(self, key: Hashable, value: Any, timeout: float | None = None) -> Stored:
        """Copies `value` into shared memory, once for all workers. Evicts the oldest objects; waits
        for calls that have these. One whose `Stored` you keep moves into it, and is sent with later
        calls.

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
        while True:
            found = self._attempt(key, value)
            if isinstance(found, Stored):
                return found
            if not self._answers.wait(found.is_complete, deadline) and deadline.has_passed():
                raise self._late(key, found, timeout)
            del found  # its error's traceback may have the object

    async def aput(self, key: Hashable, value: Any, timeout: float | None = None) -> Stored:
        """Is `put` for asyncio: other tasks run while it waits, for at most `timeout` seconds.
        Raises as `put`.
        """
        deadline, loops = Deadline(timeout), self._answers.loops
        while True:
            found = self._attempt(key, value)
            if isinstance(found, Stored):
                return found
            if not await loops.wait(found.is_complete, deadline) and deadline.has_passed():
                raise await loops.beside(partial(self._late, key, found, timeout))
            del found  # as above

    def _attempt(self, key: Hashable, value: Any) -> Stored | Pending:
        """Returns the call to wait for if there is no room."""
        if self._lock.is_mine():
            raise ConcurrentUse("this call is made in the middle of another one of this store")
        storage = self._storage
        with self._lock:
            while True:
                try:
                    place = storage.put(key, value)
                except StoreFull as error:
                    oldest = storage.ring_buffer.monotonic_id_start
                    kept = storage.living.get(oldest)
                    if kept is None or error.need > storage.ring_buffer.data_buffer_size:
                        raise
                    if (call := self._table.owing(kept)) is not None:
                        return call
                    kept._value, kept._place = storage.get(*storage.key_index[kept.key]), None
                    del storage.living[oldest]
                else:
                    stored = storage.living[place[1]] = Stored(self, key, place)
                    return stored

    def _get(self, stored: Stored) -> Any:
        with self._lock:  # meanwhile it does not move
            place = stored._place
            return stored._value if place is None else self._storage.lend(*place)

    def _late(self, key: Hashable, call: Pending, timeout: float | None) -> CallTimedOut:
        text = f"no room for {key!r}: {call.name}() has the oldest object"
        return self._answers.late(text, [*call.missing], timeout)

    def statistics(self) -> StoreStatistics:
        """Returns the counters of the store. Raises `Closed` if the group was closed."""
        return self._storage.statistics()

    @contextmanager
    def _keeps_for(self, pending: Pending) -> Iterator[None]:
        """Keeps what is pickled in the block until the call is answered."""
        pending.stored = self._sending = []
        try:
            yield
        finally:
            self._sending = None

    @contextmanager
    def _sends(self, stored: Stored) -> Iterator[None]:
        """The object does not move in the block, nor after it until the call is answered."""
        if self._sending is None:
            raise InvalidType("a Stored can be sent in calls of its own group only")
        with self._lock:
            self._sending.append(stored)
            yield

    def _close(self) -> None:
        """Frees the memory. Idempotent."""
        self._storage.close()


_storages: list[SingleWriterShmObjectStorage] = []  # of the group whose worker this process is


def attach(handle: ShmObjectStorageHandle | None) -> None:
    """Attaches to the store of this worker's group, if it has one."""
    _storages.clear()
    if handle is not None:
        _storages.append(SingleWriterShmObjectStorage.create_from_handle(handle))


def detach() -> None:
    """Closes it."""
    for storage in _storages:
        storage.close()


def fetched(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Any]:
    """The arguments of a call, with objects in the place of each `Stored`."""
    if not _storages:
        return args, kwargs
    args = [one.get() if type(one) is Stored else one for one in args]
    return args, {k: one.get() if type(one) is Stored else one for k, one in kwargs.items()}
