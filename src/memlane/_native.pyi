"""The native core of memlane: shared memory, atomics, waiting, liveness."""

from collections.abc import Callable, Sequence
from typing import Any

def install_errors(classes: dict[str, Any]) -> None:
    """
    Gives native code memlane's error classes, by name; ValueError if one is missing.
    """

def install(**functions: Callable[..., Any]) -> None:
    """
    Gives native code functions that it calls: they describe failures or log waits, say.
    """

class Buffer:
    """Memory and its owner; memoryviews of it keep both."""

class LentBuffer(Buffer):
    """Memory of an array that stays in its extent."""

class ViewLease:
    """Memory that arrays alias; freed with the last of them."""

    @property
    def is_held(self) -> bool: ...
    def covers(self, address: int) -> bool:
        """Whether the address is in that memory."""

def pooled(nbytes: int) -> Buffer:
    """Private, writable memory from a pool, with undefined contents."""

def copy_parts(target: object, offset: int, parts: object, bytes: int) -> None:
    """
    Copies `parts`, which have `bytes` in all, to `target[offset:]`; large ones without the GIL.
    """

def bytes_at(owner: object, address: int, nbytes: int) -> memoryview:
    """A view of memory that `owner` keeps alive."""

def blank_bytes(nbytes: int) -> tuple[bytes, memoryview]:
    """
    Bytes to be filled through the view before they are shared; the view must not outlive them.
    """

class CallGuard:
    """A `with` block around a call on an end: one at a time."""

    def __init__(self, check: object | None = None, finish: object | None = None) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: object | None, error: object | None, traceback: object | None
    ) -> None: ...
    @property
    def thread(self) -> int:
        """The thread that is in a call, or 0."""

    def finish(self, timeout: float | None) -> bool:
        """
        Runs `finish` once no call runs. False: one still does after `timeout` seconds.
        """

class AfterReturn:
    """Raises exceptions once the call that runs has returned."""

    @property
    def error(self) -> None:
        """
        Store an exception to have it raised after the return; no signal handler runs in between.
        """

    @error.setter
    def error(self, error: BaseException, /) -> None: ...

after_return: AfterReturn = ...

class FolderWatch:
    """
    Its descriptor is readable once a name has come to a folder, or left it.
    """

    def __init__(self, path: str) -> None:
        """Raises SystemFault."""

    def fileno(self) -> int: ...

def is_plain(object: object | None) -> bool:
    """Whether MessagePack restores the object exactly."""

def beyond_message_pack(object: object | None, extension: object) -> object:
    """
    The first part of the object that MessagePack would not restore as the same type, or None.
    """

class Outgoing:
    """A message to be sent: a file for a Pickler, and its buffer_callback."""

    def __init__(self) -> None: ...
    def write(self, data: object) -> None: ...
    def add_buffer(self, buffer: object) -> bool:
        """Returns True to leave the buffer in the stream."""

class Encoder:
    """Encodes an object once for all readers."""

    def __init__(self, codec: object) -> None: ...
    def encode(self, object: object | None) -> int:
        """
        Returns the size in bytes; until clear() the message refers to the object's memory.
        """

    def clear(self) -> None: ...
    def joined(self, header: bytes) -> bytes:
        """The whole message, after a header."""

    def settled(self) -> bytes | Buffer:
        """
        The whole message in memory that no longer changes: one copy, none for bytes.
        """

    @property
    def kind(self) -> int: ...
    @property
    def nbytes(self) -> int: ...

class Incoming:
    """The stream of a large message, as a file for an Unpickler."""

    def read(self, size: int = -1) -> bytes: ...
    def readinto(self, target: object) -> int: ...
    def readline(self) -> bytes: ...

class HeldSegment:
    """A segment that this process holds."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def label(self) -> str:
        """What people call it, or an empty string."""

    @label.setter
    def label(self, arg: str, /) -> None: ...
    @property
    def is_open(self) -> bool: ...

class Sightings:
    """A snapshot of peers."""

    def participants(self) -> dict[int, tuple[str, bytes, int]]:
        """By slot, as `participant` returns them."""

def messages_in(frame: bytes, header: bytes, sequence: int, type: type[Any]) -> list[Any] | None:
    """
    The messages of a frame, from that sequence on, as tuples of `type`; None: it is no such frame.
    """

class FrameBatch:
    """Small messages that wait for each other, to share a frame."""

    def __init__(self, codec: object, header: bytes, most: int) -> None: ...
    @property
    def has_put(self) -> bool:
        """Whether the last call of `put` has taken its message."""

    def put(self, object: object) -> bool | None:
        """
        None: it is not in it, and must be sent alone. Otherwise whether to send the frame now.
        """

    def open(self, sequence: int, messages: int, nbytes: int) -> None:
        """
        So many more messages may wait, the first of which is `sequence` if none does.
        """

    def shut(self) -> bool:
        """None may, until open(); does any?"""

    def clear(self) -> None:
        """They are elsewhere, but not sent."""

    def rest(self) -> None:
        """Nothing is left to send: the descriptor is quiet."""

    def close(self) -> None: ...
    def frame(self) -> bytes: ...
    def fileno(self) -> int:
        """Readable when the frame must be sent, full or not."""

    @property
    def first(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def nbytes(self) -> int:
        """Without headers."""

class Burst:
    """How many messages one call has sent."""

    def __init__(self) -> None: ...
    @property
    def sent(self) -> int: ...
    @sent.setter
    def sent(self, arg: int, /) -> None: ...
    @property
    def error(self) -> None:
        """
        Store the exception that has ended the call to give it the number as `sent`.
        """

    @error.setter
    def error(self, error: BaseException, /) -> None: ...

class RingGeometry:
    """The numbers that determine the layout of a ring."""

    def __init__(self, n_reader: int, max_chunk_bytes: int, max_chunks: int) -> None: ...
    @property
    def n_reader(self) -> int: ...
    @property
    def max_chunk_bytes(self) -> int: ...
    @property
    def max_chunks(self) -> int: ...
    @property
    def metadata_size(self) -> int: ...
    @property
    def metadata_offset(self) -> int: ...
    @property
    def total_bytes(self) -> int: ...

class RingSegment(HeldSegment):
    """The shared memory of one ring."""

    @staticmethod
    def create(
        geometry: RingGeometry,
        id: bytes,
        name: str,
        reserved_bytes: int,
        slot: int | None = None,
        has_late_readers: bool = False,
        is_latest: bool = False,
    ) -> RingSegment:
        """
        Creates a segment and reserves that much of each chunk; first sweeps dead segments.
        """

    @staticmethod
    def attach(
        geometry: RingGeometry, name: str, id: bytes | None = None, slot: int | None = None
    ) -> RingSegment:
        """
        Attaches to the segment `name`, as participant `slot` or only as a user.
        """

    @staticmethod
    def attach_through(
        pid: int, descriptor: int, geometry: RingGeometry, name: str, id: bytes, slot: int
    ) -> RingSegment:
        """
        Attaches to a segment that a process of this user has open, also if it has no name any more.
        """

    @property
    def is_latest(self) -> bool:
        """Whether readers get the latest message only."""

    def openings(self) -> list[int]:
        """How often each reader's place was opened again."""

    def note_work(self, id: bytes) -> None:
        """Shows observers which ring has the messages that this one answers."""

    @property
    def descriptor(self) -> int:
        """The number of its descriptor in this process."""

    @property
    def reserved_bytes(self) -> int:
        """Bytes reserved of each chunk by the creator, according to the header."""

    @property
    def is_creator(self) -> bool: ...
    @property
    def is_own(self) -> bool:
        """False in a child that was forked after the segment was opened."""

    def view(self, offset: int, bytes: int) -> memoryview: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

class PeerTable(HeldSegment):
    """
    What a network end shows observers: its peers, in a segment without a name.
    """

    def __init__(
        self,
        geometry: RingGeometry,
        queue: bytes,
        name: str,
        is_writer: bool,
        has_late_readers: bool,
    ) -> None: ...
    def write(self, row: int, slot: bytes, facts: bytes) -> None:
        """Shows one participant, packed as in its segment."""

    def close(self) -> None: ...

class Watch:
    """A descriptor for select and epoll, of an end that a thread watches."""

    def fileno(self) -> int: ...
    @property
    def is_readable(self) -> bool:
        """Whether the descriptor is, right now."""

class ChunkBlock:
    """A `with` block on a chunk; leaving it publishes or releases the chunk."""

    def __enter__(self) -> memoryview: ...
    def __exit__(
        self, kind: object | None, error: object | None, traceback: object | None
    ) -> None: ...

class RingWriter:
    """The writer's end of a ring; holds slot 0 of the segment."""

    def __init__(
        self,
        ring: RingSegment,
        ranks: Sequence[int],
        codec: object,
        max_extent_bytes: int,
        has_others: bool,
    ) -> None: ...
    def send(self, object: object, timeout: float | None) -> None:
        """Encodes and sends one object."""

    def send_encoded(self, encoder: Encoder, timeout: float | None, watch: object | None) -> None:
        """
        Sends the encoder's message; a blocked call polls `watch` like a `cancel`.
        """

    def send_many(self, objects: tuple[object, ...], timeout: float | None, burst: Burst) -> None:
        """
        Encodes and sends objects one after the other, and wakes readers once; `burst` counts them.
        """

    @property
    def has_sent(self) -> bool:
        """Whether the last call to send has published its message."""

    def wait_until_read(self, position: int, timeout: object | None) -> bool:
        """
        Waits until every reader has finished with the message at `position`; False on timeout.
        """

    def write_block(self, owner: object, timeout: float | None) -> ChunkBlock:
        """A block on the next chunk, for the caller to fill."""

    def release_reader(self, reader: int) -> bool:
        """
        Stops waiting for a reader that is dead or absent; False if it is alive.
        """

    def readmit(self, reader: int) -> bool:
        """
        Opens the place of a reader that has closed or was released; False if it is neither.
        """

    def readmit_late(self, reader: int) -> bool:
        """Opens the place for a late reader, from any thread; False: not now."""

    def kept(self) -> list[tuple[int, int, int, int, int]]:
        """
        Slot, lent messages and bytes, viewed messages and bytes, of each reader that keeps any.
        """

    @property
    def deserted_since(self) -> int | None:
        """
        When the last reader closed (ns), if none is left, as of the last look; else None.
        """

    def used_by_others(self) -> int:
        """Bytes that other files in /dev/shm use."""

    def set_absent_elsewhere(self, count: int) -> None:
        """
        Sets how many readers on other hosts have not attached; local readers wait for them, too.
        """

    def wait_until_ready(self, timeout: object | None, watch: object | None = None) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything; peers see a death."""

    def check(self) -> None:
        """Raises if this end is closed or the parent process's."""

    def watch(self) -> Watch:
        """Whose descriptor is readable while a call would not wait."""

    def show_waiting(self, is_waiting: bool, counts: bool) -> None:
        """
        Shows observers that somebody waits, though in no call; counts it as a wait.
        """

    def awaited(self) -> Sightings:
        """The peers that a call on this end waits for, and the writer."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def has_late_readers(self) -> bool: ...
    @property
    def is_latest(self) -> bool: ...
    @property
    def position(self) -> int: ...
    @property
    def label(self) -> str:
        """What people call the queue, or an empty string."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def absent_elsewhere(self) -> int: ...
    def participant(self, slot: int) -> tuple[str, bytes, int]: ...
    def counters(self) -> tuple[int, int, int, int]: ...
    def expect(self, participants: int) -> None:
        """
        Says how many processes take turns on the cores, those of other rings included.
        """

class RingReader:
    """A reader's end of a ring; holds slot 1 + reader of the segment."""

    def __init__(
        self,
        ring: RingSegment,
        ranks: Sequence[int],
        codec: object,
        reader: int,
        opening: int,
        origin: tuple[int, str] | None,
    ) -> None: ...
    def __getitem__(
        self,
        how: tuple[float | None, object | None]
        | tuple[float | None, object | None, bool]
        | tuple[float | None, object | None, bool, int],
        /,
    ) -> Any:
        """
        The next by (timeout, cancel, lend), a list with `most`, a view and lease without `lend`.
        """

    def read_block(self, owner: object, timeout: float | None, cancel: object | None) -> ChunkBlock:
        """A block on the next chunk, not decoded."""

    @property
    def place(self) -> int:
        """The index of the reader among the local ones."""

    @property
    def skipped(self) -> int:
        """Messages that it will not get, because later ones came first."""

    @property
    def origin(self) -> tuple[int, str] | None:
        """
        For a relay's ring, pid and address of the writer whose messages it passes on.
        """

    def wait_until_ready(self, timeout: object | None, watch: object | None = None) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything; peers see a death."""

    def check(self) -> None:
        """Raises if this end is closed or the parent process's."""

    def watch(self) -> Watch:
        """Whose descriptor is readable while a call would not wait."""

    def show_waiting(self, is_waiting: bool, counts: bool) -> None:
        """
        Shows observers that somebody waits, though in no call; counts it as a wait.
        """

    def awaited(self) -> Sightings:
        """The peers that a call on this end waits for, and the writer."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def has_late_readers(self) -> bool: ...
    @property
    def is_latest(self) -> bool: ...
    @property
    def position(self) -> int: ...
    @property
    def label(self) -> str:
        """What people call the queue, or an empty string."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def absent_elsewhere(self) -> int: ...
    def participant(self, slot: int) -> tuple[str, bytes, int]: ...
    def counters(self) -> tuple[int, int, int, int]: ...
    def expect(self, participants: int) -> None:
        """
        Says how many processes take turns on the cores, those of other rings included.
        """

class RingGather:
    """One reader of several rings."""

    def __init__(self, readers: list[RingReader], nothing: object) -> None: ...
    @staticmethod
    def can_wait_for(count: int) -> bool:
        """Whether so many rings can be waited for by one sleep here."""

    def __getitem__(
        self,
        how: tuple[float | None, object | None, bool]
        | tuple[float | None, object | None, bool, int],
        /,
    ) -> Any:
        """As that of a RingReader, of the readers in turn; `nothing` on timeout."""

    def replace(self, at: int, reader: RingReader) -> None:
        """Puts another reader in the place of one that is closed."""

    @property
    def ended(self) -> int | None:
        """The index of the reader of which the last call has raised."""

class ByteRingSegment(HeldSegment):
    """The shared memory of a byte ring."""

    @staticmethod
    def create(bytes: int, id: bytes, name: str) -> ByteRingSegment:
        """
        Creates a segment and reserves its first piece; first sweeps dead segments.
        """

    @staticmethod
    def attach(bytes: int, name: str) -> ByteRingSegment: ...
    @staticmethod
    def attach_through(
        pid: int, descriptor: int, bytes: int, name: str, id: bytes
    ) -> ByteRingSegment:
        """The same, of a segment without a name, which that process has open."""

    @property
    def descriptor(self) -> int:
        """The number of its descriptor in this process."""

    def check(self) -> None:
        """Raises if it is closed or the parent process's."""

    def view(self, offset: int, bytes: int) -> memoryview: ...
    def read_header(self, offset: int) -> tuple[int, int]:
        """
        Id and size of the allocation at `offset`; the size is 0 if there is none.
        """

    @property
    def addresses(self) -> dict[int, int]:
        """The addresses of all allocations by id."""

    @property
    def count(self) -> int: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def id_start(self) -> int: ...
    @property
    def id_end(self) -> int: ...
    def set_next_id(self, id: int) -> None:
        """Sets the next id; only on an empty ring."""

    def allocate(self, bytes: int) -> tuple[int, int] | NoRoom:
        """
        Reserves space for a new allocation of `bytes`, header included; returns its address and id.
        """

    def free(self, most: int, is_free: Callable[[int, int, int], bool]) -> list[int]:
        """
        Frees allocations, oldest first, while `is_free(id, offset, bytes)` of their data is true.
        """

    def clear(self) -> None:
        """Removes all allocations."""

    def close(self) -> None: ...
    def abandon(self) -> None: ...

class NoRoom:
    """Why there is no room for an allocation."""

    def __init__(self, is_obstructed: bool = False) -> None: ...
    @property
    def is_obstructed(self) -> bool:
        """Whether cleared data there is still being read."""

class PinnedObject:
    """An object that is pinned while this or a buffer of it exists."""

    def data(self) -> memoryview:
        """Metadata and data, read-only."""

    def count(self) -> memoryview:
        """The 4 count bytes."""

    def lease(self) -> ViewLease: ...
    def release(self) -> None: ...

class StoreReader:
    """A reader's end of a storage; holds slot 1 + place."""

    @staticmethod
    def attach(ring: ByteRingSegment, n_readers: int, max_object_size: int) -> StoreReader:
        """Takes the next free place."""

    def pin(self, address: object, id: object) -> PinnedObject | None:
        """Pins the object; None unless that id is stored at the address."""

    def is_valid(self, pinned: PinnedObject) -> bool:
        """Whether everything read so far belonged to the object."""

    def finish_read(self, pinned: PinnedObject, counts: bool) -> bool:
        """Ends a read; False if it was not valid."""

    def count(self, view: object) -> None:
        """Counts a read of the object whose 4 count bytes are `view`."""

    def note_progress(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything without notifying peers."""

    def check(self) -> None:
        """Raises if this end is closed or the parent process's."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def secret(self) -> bytes:
        """32 random bytes that all ends of the storage share."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    def participant(self, slot: int) -> tuple[str, bytes, int]: ...
    def counters(self) -> tuple[int, int, int, int, int, int]:
        """max_objects, puts, hits, evictions, objects, bytes."""

    def outstanding(self) -> list[int]:
        """The number of outstanding reads of each reader."""

class StoreWriter:
    """The writer's end of a storage; holds slot 0."""

    @staticmethod
    def create(
        ring: ByteRingSegment,
        n_readers: int,
        max_objects: int,
        max_object_size: int,
        secret: bytes,
        unlink_when_complete: bool,
    ) -> StoreWriter:
        """Adds an object table to the ring's file."""

    def is_read(self, id: int, view: object, references: int) -> bool:
        """
        Whether every reader has read the object with these count bytes that often.
        """

    def blockers(self, id: int, references: int) -> list[tuple[int, int, int]]:
        """
        (slot, outstanding reads, pins) of each participant that keeps the object.
        """

    def orphan_blockers(self) -> list[tuple[int, int, int]]:
        """The same for orphans."""

    def pin(self, address: object, id: object) -> PinnedObject | None:
        """Pins the object; None unless that id is stored at the address."""

    def is_valid(self, pinned: PinnedObject) -> bool:
        """Whether everything read so far belonged to the object."""

    def finish_read(self, pinned: PinnedObject, counts: bool) -> bool:
        """Ends a read; False if it was not valid."""

    def count(self, view: object) -> None:
        """Counts a read of the object whose 4 count bytes are `view`."""

    def note_progress(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything without notifying peers."""

    def check(self) -> None:
        """Raises if this end is closed or the parent process's."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def secret(self) -> bytes:
        """32 random bytes that all ends of the storage share."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    def participant(self, slot: int) -> tuple[str, bytes, int]: ...
    def counters(self) -> tuple[int, int, int, int, int, int]:
        """max_objects, puts, hits, evictions, objects, bytes."""

    def outstanding(self) -> list[int]:
        """The number of outstanding reads of each reader."""

class Reservation:
    """
    A `with` block on space for an object; without publish(), nothing is stored.
    """

    @property
    def id(self) -> int: ...
    def view(self) -> memoryview:
        """Its count bytes, metadata and data."""

    def offer(self) -> None:
        """Makes what was written an object, still without a reference."""

    def publish(self, key: object) -> tuple[int, int]:
        """Publishes the object under `key`; returns its address and id."""

    def __enter__(self) -> Reservation: ...
    def __exit__(
        self, kind: object | None, error: object | None, traceback: object | None
    ) -> None: ...

class ObjectIndex:
    """What a storage's writer tracks beside the table."""

    def __init__(
        self,
        ring: ByteRingSegment,
        end: StoreWriter,
        keys: dict[Any, tuple[int, int]],
        ids: dict[int, Any],
        references: dict[int, int],
        touched: set[int],
    ) -> None:
        """
        Keeps these up to date: key -> (address, id), id -> key, id -> references, touched ids.
        """

    def put(
        self,
        key: object,
        metadata: object,
        metadata_bytes: int,
        parts: object,
        bytes: int,
        is_free: Callable[[int, int, int], bool] | None,
    ) -> tuple[int, int] | NoRoom:
        """
        Stores an object with one reference, evicting the oldest if needed. Returns (address, id).
        """

    def reserve(
        self, size: int, is_free: Callable[[int, int, int], bool] | None
    ) -> Reservation | NoRoom:
        """Reserves space for an object, to be filled step by step."""

    def refer(self, id: int, references: int) -> None:
        """Sets how often every reader is to read the object."""

    def drop_reference(self, id: int, left: int) -> bool:
        """
        Drops a reference; changes nothing and returns False if a reader has already read it.
        """

    def free(self, is_free: Callable[[int, int, int], bool] | None) -> list[int]:
        """
        Evicts up to 2 x max_object_size bytes of what the table or `is_free` releases.
        """

class ObjectMemory:
    """The bytes of a stored object, read piece by piece."""

    def __init__(self, shown: object, is_view: bool, allows_pickle: bool) -> None:
        """
        The memory of `shown`, also after its release. With `is_view` pieces stay in place.
        """

    def tree(self) -> bytes:
        """A copy of the tree."""

    def take_array(self, itemsize: int, shape: object | None, is_writable: bool) -> object:
        """
        The next piece, for an array. CorruptMessage if it is larger than the rest.
        """

    def take_bytes(self, length: object) -> bytes | memoryview: ...
    def take_bytearray(self, length: object) -> bytearray: ...
    def take_copy(self, length: object) -> bytearray | Buffer:
        """A writable copy of the next piece."""

    def release(self) -> None:
        """Ends reading; pieces that were taken stay valid."""

    @property
    def allows_pickle(self) -> bool:
        """As given to the constructor, for decoders."""

    @property
    def is_in_place(self) -> bool:
        """Whether pieces stay in place."""

    @is_in_place.setter
    def is_in_place(self, arg: bool, /) -> None: ...

class RegionMap:
    """All bytes of a region, like mmap.mmap."""

    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Existing views stay valid: they keep the memory mapped."""

    def size(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, key: int | slice) -> int | bytes: ...
    def __setitem__(
        self, key: int | slice, value: int | bytes | bytearray | memoryview
    ) -> None: ...

class RegionRows:
    """
    A region by blocks: `rows[b]` is a writable memoryview of one row; memoryview(rows) is 2-D.
    """

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, block: int) -> memoryview: ...

class RegionFile:
    """The file of a region, and this holder's place in it."""

    def __init__(
        self,
        directory: bytes,
        name: str,
        total_bytes: int,
        blocks: int,
        row_bytes: int,
        cell_bytes: int,
        label: str = "",
    ) -> None: ...
    def enter(self, seconds: float) -> str:
        """
        One try to create or join it: 'created', 'joined', 'waiting' or 'foreign'.
        """

    def await_space(self, seconds: float) -> str:
        """'complete', 'build' (up to the caller) or 'waiting'."""

    def publish(self, huge_pages: int) -> None:
        """Announces that all space is reserved, in so many huge pages."""

    def map(self, in_huge_pages: bool) -> None: ...
    def mark_mapped(self, participants: int, seconds: float) -> str:
        """
        Removes the name once `participants` have mapped the file: 'removed', 'kept' or 'waiting'.
        """

    def leave(self, patience: float) -> tuple[bool, str]:
        """
        Frees everything. Returns whether the name was removed, and a description of any problem.
        """

    def region_map(self) -> RegionMap: ...
    def rows(self) -> RegionRows: ...
    def memory(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def allocated(self) -> int:
        """Bytes whose space is allocated."""

    @property
    def free(self) -> int:
        """Free bytes of its file system."""

    @property
    def label(self) -> str:
        """What people call the region, once it is entered, or empty."""

    @property
    def huge_pages(self) -> int:
        """Of the whole region, once its space is complete."""

    @property
    def builder(self) -> int:
        """The pid of the process that reserves the space, or 0."""

    @property
    def is_own(self) -> bool: ...

class Population:
    """Threads that reserve and populate pages; they end with this object."""

    def __init__(
        self,
        region: RegionFile,
        offset: int,
        bytes: int,
        stride: int,
        count: int,
        is_builder: bool,
        pages: str,
        threads: int,
    ) -> None: ...
    def wait(self, seconds: float) -> str:
        """'reserved' (once), 'done' or 'working'; raises a thread's error."""

    def stop(self) -> None: ...
    @property
    def done(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def huge_pages(self) -> int:
        """Those that were made here."""

    @property
    def was_touched(self) -> bool: ...

def await_bytes(fd: int, bytes: int, seconds: float) -> bool:
    """Waits until the file has that many bytes; False on timeout."""

def usable_cores() -> int: ...

class BlockArray:
    """Memory divided into blocks by its first axis."""

    @staticmethod
    def of_buffer(buffer: object) -> BlockArray:
        """Wraps an object with the buffer protocol, and keeps it alive."""

    @staticmethod
    def at(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> BlockArray:
        """Wraps memory that the caller keeps alive; strides in bytes."""

    @property
    def block_bytes(self) -> int: ...
    @property
    def count(self) -> int: ...

def copy_blocks(src: BlockArray, dst: BlockArray, pairs: object, threads: int) -> tuple[int, int]:
    """
    Returns the bytes moved and the number of threads that failed to start; 0 threads: automatic.
    """

class CudaCopies:
    """Asynchronous copies with the functions of a CUDA runtime."""

    def __init__(self, copy: int, copy_2d: int, batch: int, tells_index: bool) -> None:
        """
        Function addresses; `batch` 0: none. `tells_index`: it reports which copy was refused.
        """

    def queue(
        self,
        src: BlockArray,
        dst: BlockArray,
        pairs: object,
        to_device: bool,
        stream: int,
        begins: Sequence[int],
    ) -> tuple[int, int, str, int]:
        """
        Returns bytes, number of copies, ways and CUDA's error. No copy crosses one of `begins`.
        """

class PinnedBlocks:
    """`memlane.tiers.Pin`."""

    def blocks(self) -> bytes: ...
    def take(self, other: PinnedBlocks) -> None:
        """Those of the other, too, which has none from now on."""

    def release(self) -> None: ...

class ReservedBlocks:
    """`memlane.tiers.Reservation`."""

    def blocks(self) -> bytes: ...
    def commit(self, mask: bytes) -> None: ...
    def release(self) -> None: ...

class BlockPool:
    """
    Which key is in which block; `memlane.tiers.BlockPool` checks its arguments.
    """

    def __init__(self, blocks: int, policy: object) -> None: ...
    def pin(self, keys: object) -> PinnedBlocks: ...
    def touch(self, keys: object) -> None: ...
    def reserve(self, keys: object) -> tuple[ReservedBlocks, bytes, list[bytes], bytes]:
        """
        Blocks; of each key, -1 if it was skipped; what was evicted; where that is aside, or -1.
        """

    def has(self, keys: object) -> list[bool]: ...
    def set_aside(self, count: int) -> int:
        """So many free blocks are spare, as far as there are; returns how many."""

    def aside(self) -> bytes:
        """The blocks that hold what was evicted."""

    def reuse(self, blocks: bytes) -> None:
        """Those that are aside are spare."""

    def pin_stored(self, next: int, most: int) -> tuple[PinnedBlocks, list[bytes], int]:
        """
        Pins up to `most` stored blocks from `next` on: the pin, their keys, where to go on.
        """

    def count_dropped(self, blocks: int) -> None:
        """Counts evicted blocks that were lost."""

    def set_left_out(self, tiers: int) -> None:
        """Shows how many tiers behind the pool are not tried for now."""

    def insert(self, keys: object) -> None:
        """Stores and pins keys that are not there, in blocks that are free."""

    def evict(self, count: int, kept: object) -> list[bytes] | None:
        """
        The keys of so many blocks that are not pinned, nor of `kept`; None: there are less.
        """

    def set_pinned(self, keys: object, is_pinned: bool) -> None: ...
    def forget(self, keys: object) -> None: ...
    def show(self, id: bytes, name: str, label: str) -> None:
        """Lets `memlane.inspect` see its counters."""

    def clear(self) -> None: ...
    def statistics(self) -> dict[str, int]: ...
    def forecast(self, more_blocks: int) -> dict[str, int]:
        """
        Counts of a pool with so many blocks more, since it was first asked for.
        """

class Replay:
    """A policy alone, on a trace; `python -m memlane.tiers.replay` runs it."""

    def __init__(self, policy: str, blocks: int) -> None: ...
    def request(self, ids: Sequence[int]) -> None: ...
    def counts(self) -> dict[str, int]: ...

def slots_in(capacity: int, row_bytes: int) -> int:
    """
    How many slots of a disk tier fit into so many bytes, with their headers.
    """

def crc32c(data: bytes | bytearray | memoryview, crc: int = 0) -> int:
    """
    CRC-32C, as the tiers compute it, of the bytes after those that gave `crc`.
    """

class PairOutside:
    """A pair of a disk tier's files, whether a tier has it open or not."""

    def __init__(self, path: str) -> None:
        """`path`.headers"""

    def owner(self) -> int | None:
        """The pid of who has it open, 0 if it is unknown, or None."""

    @property
    def slots(self) -> int: ...
    @property
    def slot_bytes(self) -> int: ...
    def stored(self) -> list[tuple[bytes, int, int, int, int, int]]:
        """
        (namespace, blocks, when the oldest and newest were stored, last use, hits) of each.
        """

    def remove(self, name_space: bytes | None) -> bool:
        """Removes its blocks, or all; False: a tier has it open."""

def ask_owner(folder: str, opener: str, name_space: bytes | None, timeout: object) -> int | None:
    """
    The open tier removes a namespace's blocks, or all: 0, an errno, or None (no answer).
    """

class PinnedSlots:
    """Blocks that are not evicted; `memlane.tiers.TierPin`."""

    def release(self) -> None: ...

class DiskOrder:
    """What a disk tier's thread of headers was told to do."""

class DiskTier:
    """`memlane.tiers.DiskTier` checks its arguments."""

    def __init__(
        self,
        folder: str,
        opener: str,
        rows: object,
        count: int,
        row_bytes: int,
        slots: int,
        name_space: bytes,
        direct: bool | None,
        margin: int | None,
        threads: int,
        may_ring: bool,
        policy: object,
        ttl: int = 0,
        quota: int = 0,
        share: float = 0.0,
    ) -> None: ...
    def show(self, id: bytes, name: str, label: str) -> None:
        """Lets `memlane.inspect` see its counters."""

    def facts(self) -> dict[str, Any]: ...
    def has(self, keys: object, is_lookup: bool = True) -> list[bool]: ...
    def hold(self, keys: object) -> tuple[PinnedSlots, list[bool]]:
        """(what pins them, whether each is there)"""

    def store(self, keys: object, rows: bytes, timeout: object, is_access: bool = True) -> int: ...
    def load(self, keys: object, rows: bytes, timeout: object) -> int: ...
    @property
    def last(self) -> int:
        """The ticket of the latest store or load; 0: there was none."""

    def touch(self, keys: object) -> None: ...
    def forget(self, keys: object) -> DiskOrder: ...
    def clear(self) -> DiskOrder: ...
    def keep_uses(self) -> DiskOrder:
        """Writes when blocks were used, for a restart."""

    def wait(self, order: DiskOrder, timeout: object) -> int:
        """0 or an errno."""

    def collect(self, wakes: bool) -> bool:
        """Takes in what the threads have done; whether nothing is under way."""

    def poll(self, reports: object, make: object) -> None:
        """Appends what `make` returns for each report to `reports.waiting`."""

    def wake(self) -> None:
        """Makes the descriptor readable until the next poll."""

    def alerts(self) -> tuple[bool, int, int, int, list[tuple[bool, int, int]]]:
        """
        Whether files are gone, looks that found blocks or headers late, corrupt blocks, refusals.
        """

    def idle_fileno(self) -> int:
        """Readable while nothing is under way, as of the last call that looked."""

    def fileno(self) -> int: ...
    def changes(self) -> list[tuple[bytes, bool]]:
        """
        Digests that were stored, or are gone, since the last call; b"": all are.
        """

    def statistics(self) -> dict[str, Any]: ...
    def close(self) -> bool:
        """Whether nothing was under way."""

class SlotReader:
    """Another opener's pair of files of a disk tier, for reading."""

    def __init__(self, path: str, row_bytes: int, name_space: bytes) -> None:
        """`path`.headers and `path`.data."""

    @property
    def number(self) -> int:
        """The inode of its headers."""

    @property
    def last_sequence(self) -> int:
        """The greatest of all namespaces, as of the last look; or -1."""

    def look(self, in_any_case: bool) -> None:
        """Reads which keys there are, if the file has changed."""

    def has(self, digests: Sequence[bytes], after: Sequence[int]) -> list[bool]:
        """Whether it has these keys, stored after those sequences."""

    def get(
        self, digests: Sequence[bytes], after: Sequence[int], into: Sequence[object]
    ) -> list[int | None]:
        """Reads rows; what the CRC of each should be, or None."""

def read_replies(
    socket: int, seconds: float, kinds: str, into: Sequence[object]
) -> tuple[list[object], str, int, bytes]:
    """
    Reads a reply for each buffer or None: numbers or refusals; fault, errno, line.
    """

def place_blocks(
    values: Sequence[object], crcs: Sequence[int], rows: object, row_bytes: int, ids: Sequence[int]
) -> list[bool]:
    """
    Copies values, headers and rows, into those rows; whether each fits the CRC of its key.
    """

def call_aside(call: Callable[[], object], start: Callable[..., object]) -> bool:
    """
    Calls it where no signal handler runs, and waits. False if there is no thread for that.
    """

def sweep_dead_segments() -> list[str]:
    """
    Removes the segments of this user that no living process holds; returns their names.
    """

def close_in_children(fd: int, always: bool = False) -> int:
    """
    Makes forked children close `fd`: while it is the same file, or `always`. Returns the inode.
    """

def fork_generation() -> int:
    """
    A number that differs in each forked child, also after forks by C code; makes no system call.
    """

def keep_in_children(fd: int, inode: int) -> None:
    """Undoes close_in_children, once the descriptor is closed."""
