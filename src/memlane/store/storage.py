"""SingleWriterShmObjectStorage: one writer puts objects by key, N readers get them by address."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from memlane._base.arguments import integer_from
from memlane._base.blame import listed, role_name, suspicion
from memlane._base.diagnosis import facts_about, participant, warn
from memlane._base.labels import checked_label
from memlane._base.lifetime import Owned, undone_by
from memlane._base.segments import released_after
from memlane._importing import fork_waits
from memlane._native import NoRoom, ObjectIndex, StoreReader, StoreWriter, copy_parts
from memlane.errors import InvalidArgument, InvalidType, StoreFull, UnknownKey, WrongRole
from memlane.store.handle import ShmObjectStorageHandle
from memlane.store.reading import ObjectReads
from memlane.store.ring import ID_MAX, SingleWriterShmRingBuffer
from memlane.store.serde import MsgpackSerde, ObjectSerde
from memlane.store.statistics import StoreStatistics, store_statistics

if TYPE_CHECKING:
    from typing import Self

    from memlane._base.blame import Facts
    from memlane._doors.door import Door

_SERVED = "SingleWriterShmObjectStorage"  # as doors call it
MAX_READERS = 1 << 16
MAX_REFERENCES = 2**31 - 1


@dataclass(frozen=True)
class StoreBlocker:
    """A process that keeps the oldest object of a storage from being evicted.

    Attributes:
        rank: the reader's place, from 0; None for the writer itself.
        pid: None while absent.
        state: absent, running or stopped; unknown if /proc cannot say.
        owes: number of reads of that object that are outstanding.
        pins: number of its reads and views of that object that are in progress.
        last_progress: time of its last read, or of attaching, on the clock of `time.monotonic()`
            (seconds); None while absent.
    """

    rank: int | None
    pid: int | None
    state: str
    owes: int
    pins: int
    last_progress: float | None


class SingleWriterShmObjectStorage(ObjectReads, Owned):
    """Objects in a ring: one writer puts them by key, `n_readers` readers get them by address.

    Args:
        max_object_size: limit of one object in bytes: 4 of read count, metadata and data. An object
            must also fit the ring, with 8 bytes more; a larger limit is logged.
        n_readers: number of readers. Each is to read an object once per reference to it.
        ring_buffer: if this process created it, this is the writer; if it attached to it, this is a
            reader, in the next free place. The storage closes it.
        serde_class: an `ObjectSerde`, which converts values to bytes and back.
        reader_lock: accepted for compatibility with vLLM; memlane needs no lock. With one, a `get`
            by the writer counts as a reader's.
        max_objects: most objects at once; `min(65536, data_buffer_size // 1024 + 64)` if None.
        unlink_when_complete: for the writer: remove the name once all readers have attached. Then
            nothing is left behind however they end. A reader that takes the place of one that has
            ended attaches through the writer's process: it must be of the same user and pid
            namespace.
        name: what people call the storage; shown by every command, in errors and metrics.
        serve: for the writer: other programs of this user and host join by
            `SingleWriterShmObjectStorage.open(name)`.

    Attributes:
        key_index, id_index, writer_flag: on the writer, key -> (address, id), id -> key, and
            id -> references. Do not change them.
        flag_bytes: size of the read count before each object, 4.
        is_writer, max_object_size, n_readers, serde_class, ring_buffer: as above.
        ser_de: the instance of `serde_class`.

    Raises:
        RankTaken: the ring has a storage already, or all readers have attached.
        LayoutMismatch: the ring has no storage, or one with other parameters.
        ShmExhausted: /dev/shm has no space for the table.
        NameTaken: a living process serves under that name.
        InvalidArgument: it is to be served, and has no name, or a serde that is not registered.

    When full, the store evicts the oldest object that every live reader has read as often as it was
    referenced, and that nobody is reading. Make the writer's calls, such as `put` and `get_cached`,
    from one thread at a time; `get` and `view` may run in several. A storage that is
    garbage-collected without `close()` is reported as dead by its peers.

    Example::

        ring = SingleWriterShmRingBuffer(16 << 20, create=True)
        with SingleWriterShmObjectStorage(8 << 20, n_readers=1, ring_buffer=ring) as store:
            reader = SingleWriterShmObjectStorage.create_from_handle(store.handle())  # elsewhere
            address, number = store.put("key", [1, 2])
            print(reader.get(address, number))  # [1, 2]
            reader.close()
    """

    flag_bytes = 4
    _door: Door | None = None  # by which others join, if it is served
    _instead_of_pickling = "send handle(), and call create_from_handle(handle) in the receiver"

    def __init__(
        self,
        max_object_size: int,
        n_readers: int,
        ring_buffer: SingleWriterShmRingBuffer,
        serde_class: type[ObjectSerde] = MsgpackSerde,
        reader_lock: Any = None,
        *,
        max_objects: int | None = None,
        unlink_when_complete: bool = False,
        name: str | None = None,
        serve: bool = False,
    ) -> None:
        self.max_object_size = integer_from("max_object_size", max_object_size, 1)
        self.n_readers = integer_from("n_readers", n_readers, 1)
        if self.n_readers > MAX_READERS or self.max_object_size >= 1 << 62:
            raise InvalidArgument(f"at most {MAX_READERS} readers, and objects below 2**62 bytes")
        if not isinstance(ring_buffer, SingleWriterShmRingBuffer):
            raise InvalidType(
                f"a SingleWriterShmRingBuffer is needed, not {type(ring_buffer).__name__}"
            )
        label = checked_label(name)
        if serve and not ring_buffer.is_writer:
            raise WrongRole("Only the writer can serve a storage by its name")
        if serve and not label:
            raise InvalidArgument("serve=True needs a name")
        size = ring_buffer.data_buffer_size
        most = min(65536, size // 1024 + 64) if max_objects is None else max_objects
        most = integer_from("max_objects", most, 1)
        if most > ID_MAX:
            raise InvalidArgument(f"max_objects must be at most 2**31, not {max_objects}")
        self.serde_class = serde_class
        self.ser_de = serde_class()
        self.ring_buffer = ring_buffer
        self.is_writer = ring_buffer.is_writer
        self._reader_lock = reader_lock
        self._does_count = not self.is_writer or reader_lock is not None
        self._unlinks = self.is_writer and unlink_when_complete
        own, known = type(self), SingleWriterShmObjectStorage
        self._has_own_steps = any(getattr(own, step) is not getattr(known, step) for step in _STEPS)
        self._has_own_check = own.default_is_free_check is not known.default_is_free_check
        # On the writer: key -> (address, id), id -> key, id -> references. Changed by ObjectIndex.
        self.key_index: dict[Hashable, tuple[int, int]] = {}
        self.id_index: dict[int, Hashable] = {}
        self.writer_flag: dict[int, int] = {}
        self._touched: set[int] = set()
        segment = ring_buffer._segment
        if self.is_writer:
            with ring_buffer._only_writer("make a storage"):
                sizes = self.n_readers, most, self.max_object_size
                secret = os.urandom(32)
                self._end = StoreWriter.create(segment, *sizes, secret, unlink_when_complete)
                books = self.key_index, self.id_index, self.writer_flag, self._touched
                self._index = ObjectIndex(segment, self._end, *books)
            least = self.max_object_size + ring_buffer.MD_SIZE
            if size < least:  # no error: vLLM accepts it, and smaller objects fit
                warn(
                    "objects of up to %d bytes are allowed (max_object_size), but the ring has %d: "
                    "larger ones raise StoreFull; make a ring of at least %d bytes, or lower "
                    "max_object_size",
                    self.max_object_size,
                    size,
                    least,
                )
        else:
            self._end = StoreReader.attach(segment, self.n_readers, self.max_object_size)
        self._own(self._end.abandon)
        if label:
            segment.label = label
        if serve:
            with undone_by(self._abandon):
                self._door = _door_of(label, cast("StoreWriter", self._end), self.handle())

    @classmethod
    def open(cls, name: str, *, timeout: float | None = None) -> Self:
        """Attaches to the storage that a program of this user serves under `name`, once one does,
        in the next free place.

        Args:
            name: as that of the storage that was made with `serve=True`.
            timeout: in seconds.

        Raises:
            TimedOut: after `timeout` seconds; it says what was missing.
            RankTaken: living processes have all places.
            InvalidArgument: what is served there is no storage, or its serde is not registered.
            SegmentRefused: the folder of names, or the socket, is not this user's alone.
            LayoutMismatch: its writer has another version of memlane.
            MemlaneError: as `create_from_handle`.
        """
        with fork_waits:
            from memlane._doors.search import opened

        return opened(name, _SERVED, None, timeout, cls._of_door)

    @classmethod
    async def aopen(cls, name: str, *, timeout: float | None = None) -> Self:
        """Is `open` for asyncio; `timeout` is in seconds. If it is cancelled, its place is free.
        Raises as `open`.
        """
        with fork_waits:
            from memlane._doors.search import aopened

        return await aopened(name, _SERVED, None, timeout, cls._of_door)

    @classmethod
    def _of_door(cls, text: str, _rank: int) -> Self:
        return cls.create_from_handle(ShmObjectStorageHandle.from_json(text))

    @classmethod
    def create_from_handle(cls, handle: ShmObjectStorageHandle) -> Self:
        """Attaches a reader, in the next free place.

        Raises:
            SegmentMissing: the storage is gone, or on another host.
            RankTaken: all readers have attached.
            SegmentRefused, LayoutMismatch: the segment is not this user's, or no such storage.
            InvalidArgument: no storage can have made this handle.
        """
        if not isinstance(handle, ShmObjectStorageHandle):
            raise InvalidType(f"a ShmObjectStorageHandle is needed, not {type(handle).__name__}")
        handle.validate()
        ring = SingleWriterShmRingBuffer._attached(*handle.ring_buffer_handle, handle._file())
        with undone_by(ring.close):
            sizes = handle.max_object_size, handle.n_readers
            return cls(*sizes, ring, handle.serde_class, handle.reader_lock)

    @property
    def name(self) -> str:
        """The storage's name. Raises `Closed`."""
        return self.ring_buffer._segment.label

    # The writer -----------------------------------------------------------------------------

    def put(self, key: Hashable, value: Any) -> tuple[int, int]:
        """Stores `value` with one reference; returns (address, id), with which readers get it.

        Raises:
            InvalidArgument: the key is stored already, or the object is too large.
            InvalidType: the serde cannot store it; see `MsgpackSerde`.
            StoreFull: a MemoryError; the oldest object cannot be evicted, and `readers` says why;
                or the object is larger than the ring.
            ShmExhausted: /dev/shm has no space for the ring to grow.

        Whatever it raises, nothing was stored.
        """
        with self.ring_buffer._only_writer("put"):
            self._must_be_new(key)
            return self._put(key, self._serialized(value))

    def _must_be_new(self, key: Hashable) -> None:
        if self._has(key):
            raise InvalidArgument(f"Key {key!r} already exists in the storage")

    def _put(self, key: Hashable, serialized: tuple[Any, int, Any, int]) -> tuple[int, int]:
        data, data_bytes, metadata, md_bytes = serialized
        size = self.flag_bytes + md_bytes + data_bytes
        self._check_size(key, size)
        if self._has_own_steps:
            place = self._put_by_steps(key, size, data, data_bytes, metadata, md_bytes)
        else:
            parts = _checked_parts(data)
            place = self._index.put(key, metadata, md_bytes, parts, data_bytes, self._is_free())
        if isinstance(place, NoRoom):
            raise self._full(key, size, place.is_obstructed)
        return place

    def _put_by_steps(
        self, key: Hashable, size: int, data: Any, data_bytes: int, metadata: Any, md_bytes: int
    ) -> tuple[int, int] | NoRoom:
        """Like `ObjectIndex.put`, with the steps that a subclass overrides."""
        space = self._index.reserve(size, self._is_free())
        if isinstance(space, NoRoom):
            return space
        with space:
            with released_after(space.view()) as view:
                view[: self.flag_bytes] = bytes(self.flag_bytes)
                self.copy_to_buffer(data, data_bytes, metadata, md_bytes, view)
            space.offer()
            self.increment_writer_flag(space.id)
            return space.publish(key)

    def _is_free(self) -> Callable[[int, int, int], bool] | None:
        """A subclass's check, or None. Not stored: the storage would keep itself alive."""
        return self.ring_buffer._shown(self.default_is_free_check) if self._has_own_check else None

    def _check_size(self, key: Hashable, size: int) -> None:
        if size > self.max_object_size:
            raise InvalidArgument(
                f"the object of {key!r} ({size} bytes with read count and metadata) "
                f"exceeds max object size ({self.max_object_size} bytes)"
            )
        ring = self.ring_buffer
        total = size + ring.MD_SIZE
        ring._check_total(total)
        if total > ring.data_buffer_size:
            raise StoreFull(
                f"{self._called}no room for {key!r}: its {total} bytes are more than the whole "
                f"ring has ({ring.data_buffer_size}); make a ring of at least {total} bytes",
                size,
                key,
            )

    def _full(self, key: Hashable, need: int, is_obstructed: bool) -> StoreFull:
        """The error for an object of `need` bytes: the oldest allocation of the ring cannot be
        freed. It names the processes that keep it.

        `is_obstructed`: the ring has room, or the table an entry, but an orphan there is still
        being read.
        """
        what = f"{self._called}no room for {key!r}, {need} bytes"
        end, ring = self._checked_writer(), self.ring_buffer
        found = end.orphan_blockers() if is_obstructed else []
        oldest = ring.monotonic_id_start
        kept, kept_what = None, "cleared data"
        if not found and oldest in ring.metadata:
            if oldest not in self.id_index:
                why = (
                    f"the oldest allocation, id {oldest}, is not the storage's own; free_buf() may "
                    f"free it"
                )
                return StoreFull(f"{what}: {why}", need, key)
            kept = self.id_index[oldest]
            kept_what = f"the oldest object, {kept!r},"
            if oldest in self._touched:
                why = f"{kept_what} is pinned by touch(); call release_touches()"
                return StoreFull(f"{what}: {why}", need, key, kept)
            found = end.blockers(oldest, min(self.writer_flag.get(oldest, 0), MAX_REFERENCES))
        blockers = [_blocker(end, *one) for one in found]
        blockers.sort(key=lambda one: suspicion(one[1]))
        facts = [one for _, one in blockers]
        who = listed(facts) if facts else "a process that has just released it"
        culprits = tuple(blocker for blocker, _ in blockers)
        return StoreFull(f"{what}: {kept_what} is kept by {who}", need, key, kept, culprits)

    @property
    def _called(self) -> str:
        return f"store {self.name}: " if self.name else ""

    def _serialized(self, value: Any) -> tuple[Any, int, Any, int]:
        parts = self.ser_de.serialize(value)
        try:
            data, data_bytes, metadata, md_bytes = parts
        except (TypeError, ValueError):
            raise InvalidType(
                f"{self.serde_class.__name__}.serialize must return data, its size, metadata and "
                f"its size; it returned {type(parts).__name__}"
            ) from None
        data_bytes = integer_from("the size of the data", data_bytes, 0)
        return data, data_bytes, metadata, integer_from("the size of the metadata", md_bytes, 0)

    def _checked_writer(self, call: str = "do that") -> StoreWriter:
        """The writer's end, if still usable: Python code may have closed it or forked."""
        self._end.check()
        if not isinstance(self._end, StoreWriter):
            raise WrongRole(f"Only the writer can {call}")
        return self._end

    def _has(self, key: Hashable) -> bool:
        try:
            return key in self.key_index
        except TypeError:
            raise InvalidType(f"a key must be hashable, not {type(key).__name__}") from None

    def _find(self, key: Hashable) -> tuple[int, int]:
        if not self._has(key):
            raise UnknownKey(f"no object is stored under {key!r}; it may have been evicted")
        return self.key_index[key]

    def copy_to_buffer(
        self, data: Any, data_bytes: int, metadata: Any, md_bytes: int, data_view: memoryview
    ) -> None:
        """Writes metadata, then data, after the read count; the lengths, in bytes, must be right.

        Raises:
            InvalidArgument: `data` is neither bytes nor a list, or has another length.
        """
        parts = _checked_parts(data)
        copy_parts(data_view, self.flag_bytes, [metadata], md_bytes)
        copy_parts(data_view, self.flag_bytes + md_bytes, parts, data_bytes)

    def increment_writer_flag(self, id: int) -> None:
        """Adds a reference: every reader is to read the object once more.

        Raises:
            WrongRole: this is a reader.
            InvalidArgument: the object has 2**31 - 1 references.
        """
        references = self.writer_flag.get(id, 0) + 1
        if references > MAX_REFERENCES:
            raise InvalidArgument(f"object {id} has {MAX_REFERENCES} references, the maximum")
        self._checked_writer()
        self._index.refer(id, references)

    def is_cached(self, key: Hashable) -> bool:
        """Returns whether an object is stored under `key`.

        Raises:
            WrongRole: this is a reader.
            InvalidType: the key is not hashable.
        """
        self._checked_writer("is_cached")
        return self._has(key)

    def get_cached(self, key: Hashable) -> tuple[int, int]:
        """Adds a reference for all readers; returns (address, id).

        Raises:
            UnknownKey: nothing is stored under that key (any more).
            WrongRole: this is a reader.
        """
        with self.ring_buffer._only_writer("get_cached"):
            address, number = self._find(key)
            self.increment_writer_flag(number)
            self._touched.discard(number)
            return address, number

    def drop_reference(self, key: Hashable) -> None:
        """Removes a reference that no reader has read; without any, the object may be evicted.

        Raises:
            UnknownKey: nothing is stored under that key.
            InvalidArgument: a reader has already read the last reference, or there is none.
        """
        with self.ring_buffer._only_writer("drop_reference"):
            number = self._find(key)[1]
            left = self.writer_flag.get(number, 0) - 1
            if left < 0:
                raise InvalidArgument(f"{key!r} has no reference to drop")
            if not self._index.drop_reference(number, left):
                raise InvalidArgument(f"a reader has already read the last reference of {key!r}")

    def touch(self, key: Hashable) -> None:
        """Keeps the object from eviction until its next `get_cached` or `release_touches()`.

        Raises as `get_cached`.
        """
        with self.ring_buffer._only_writer("touch"):
            self._touched.add(self._find(key)[1])

    def release_touches(self) -> None:
        """Undoes every `touch`.

        Raises:
            WrongRole: this is a reader.
        """
        with self.ring_buffer._only_writer("release_touches"):
            self._touched.clear()

    def free_unused(self) -> None:
        """Evicts objects that may be evicted, oldest first, up to 2 x max_object_size bytes.

        Raises:
            WrongRole: this is a reader.
        """
        with self.ring_buffer._only_writer("free_unused"):
            self._index.free(self._is_free())

    def clear(self) -> None:
        """Empties ring and indexes; ids continue.

        Readers can still get objects whose address they know until the space is reused. The space
        of objects that are being read is not reused. On a reader, raises `WrongRole`.
        """
        self.ring_buffer.clear()

    def default_is_free_check(self, id: int, buf: memoryview) -> bool:
        """Returns whether the object's reads have reached `writer_flag[id]` x `n_readers`.

        Readers that closed or died count as done. The table decides; the count in the first 4
        bytes of `buf` is used for bytes that are not an object in the table. Raises
        `Closed` if this storage was closed.
        """
        references = self.writer_flag.get(id)
        if references is None:
            return False  # not one of the storage's objects
        return self._checked_writer().is_read(id, buf, max(0, references))

    # Everybody ------------------------------------------------------------------------------

    def handle(self) -> ShmObjectStorageHandle:
        """The handle with which readers attach; raises `Closed` if this storage was closed."""
        self._end.check()
        sizes = self.max_object_size, self.n_readers
        ring = self.ring_buffer.handle()
        file = self.ring_buffer._file if self._unlinks else None
        return ShmObjectStorageHandle(*sizes, ring, self.serde_class, self._reader_lock, file)

    def statistics(self) -> StoreStatistics:
        """Counters, and the state of every reader; makes a few system calls per reader.

        Raises:
            Closed: this storage was closed.
        """
        return store_statistics(self._end)

    def close(self) -> None:
        """Closes the storage in this process, and its ring, and tells the peers. Idempotent.

        A closed reader no longer blocks eviction. Attached readers can still read what a closed
        writer stored. Memory stays mapped while views of it exist, but may change.
        """
        if self._door is not None:
            self._door.close()
        self._end.close()
        self.ring_buffer.close()
        self._disown()

    def _abandon(self) -> None:
        if self._door is not None:
            self._door.close()
        super()._abandon()

    def _end_block(self, has_failed: bool) -> None:
        if has_failed:
            self._abandon()
            self.ring_buffer.close()
        else:
            self.close()

    def _check(self) -> None:
        self._end.check()

    def __repr__(self) -> str:
        role = "writer" if self.is_writer else "reader"
        closed = " closed" if self.is_closed else ""
        return (
            f"<SingleWriterShmObjectStorage {self.ring_buffer.handle()[1]} {role}{closed}, "
            f"{len(self.key_index)} objects, {self.n_readers} readers>"
        )


def _door_of(label: str, end: StoreWriter, handle: ShmObjectStorageHandle) -> Door:
    with fork_waits:
        from memlane._doors.door import Door
        from memlane.store.serving import StoreHost

    return Door(label, StoreHost(end, handle))


def _checked_parts(data: Any) -> Any:
    if not isinstance(data, (bytes, list)):
        raise InvalidArgument(f"Unsupported data type for serialization: {type(data)}")
    return data if isinstance(data, list) else [data]


def _blocker(end: StoreWriter, number: int, owes: int, pins: int) -> tuple[StoreBlocker, Facts]:
    """The participant in that slot, and what is said of it."""
    who = participant(end, number)
    slot, rank = who.slot, None if number == 0 else number - 1
    is_absent = who.state == "absent"
    more = []
    if owes:
        more.append(f"has not read it {'yet' if owes == 1 else f'{owes} times'}")
    if pins and slot.views:
        held = (who.at - slot.views_since) / 1e9
        more.append(f"reads it or holds a view of it, for {held:.1f} s")
    name = "the writer itself" if rank is None else role_name("reader", rank)
    pid, progress = (None, None) if is_absent else (slot.pid, slot.last_progress / 1e9)
    blocker = StoreBlocker(rank, pid, who.state, owes, pins, progress)
    return blocker, facts_about(who, name, views=0, more=tuple(more))


_STEPS = ("copy_to_buffer", "increment_writer_flag")
