"""The native core of memlane: shared memory, atomics, waiting, liveness."""

from collections.abc import Callable, Sequence
from typing import Any

class Buffer:
    """Memory, and what keeps it; its memoryviews keep both."""

class LentBuffer(Buffer):
    """Memory of an array that a reader keeps where it came."""

class ViewLease:
    """Memory that arrays alias; given back when the last of them goes."""

    @property
    def is_held(self) -> bool: ...
    def covers(self, address: int) -> bool:
        """Does it lie in that memory?"""

class RingGeometry:
    """Numbers that fix the bytes of a ring."""

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

class HeldSegment:
    """A segment that this process holds."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def is_open(self) -> bool: ...

class RingSegment(HeldSegment):
    """The shared memory of one ring."""

    @staticmethod
    def create(
        geometry: RingGeometry, id: bytes, name: str, reserved_bytes: int, slot: int | None = None
    ) -> RingSegment:
        """
        Makes a segment, reserving so much of every chunk; sweeps what the dead left first.
        """

    @staticmethod
    def attach(
        geometry: RingGeometry, name: str, id: bytes | None = None, slot: int | None = None
    ) -> RingSegment:
        """
        Joins the segment of that name, as the participant `slot` or as a mere user.
        """

    @property
    def reserved_bytes(self) -> int:
        """Of every chunk, as its creator has them, and its header says."""

    @property
    def is_creator(self) -> bool: ...
    @property
    def is_own(self) -> bool:
        """False in a child that was forked after the segment was opened."""

    def view(self, offset: int, bytes: int) -> memoryview: ...
    def close(self) -> None: ...
    def abandon(self) -> None: ...

def is_plain(object: object | None) -> bool:
    """Does MessagePack give it back exactly as it is?"""

def beyond_message_pack(object: object | None, extension: object) -> object:
    """
    The first part of it that MessagePack would not give back as what it is; None if there is none.
    """

class Outgoing:
    """
    A message on its way out: a file for a Pickler, and its buffer_callback.
    """

    def __init__(self) -> None: ...
    def write(self, data: object) -> None: ...
    def add_buffer(self, buffer: object) -> bool:
        """True leaves it in the stream."""

class Encoder:
    """An object on its way to bytes, encoded once for everybody."""

    def __init__(self, codec: object) -> None: ...
    def encode(self, object: object | None) -> int:
        """Its bytes; until clear() the message refers to the object's memory."""

    def clear(self) -> None: ...
    def joined(self, header: bytes) -> bytes:
        """The whole message behind a header."""

    def settled(self) -> bytes | Buffer:
        """
        The whole message in memory that nobody changes any more: one copy, none of bytes.
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

class Turn:
    """`with` around each call on an end, of which there is one at a time."""

    def __init__(self, check: object | None = None, finish: object | None = None) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: object | None, error: object | None, traceback: object | None
    ) -> None: ...
    @property
    def thread(self) -> int:
        """That is in a call; 0: none is."""

    def acquire(self, timeout: float = -1.0) -> bool:
        """
        Keeps calls out; False if one is under way for longer. Below 0: for ever.
        """

    def release(self) -> None: ...

def pooled(nbytes: int) -> Buffer:
    """
    Private, writable memory that is used again; what it holds is anything.
    """

def blank_bytes(nbytes: int) -> tuple[bytes, memoryview]:
    """
    Bytes to be filled through the view, before anybody sees them; it must not outlive them.
    """

class ChunkBlock:
    """`with` on a chunk; leaving it publishes it, or gives it back."""

    def __enter__(self) -> memoryview: ...
    def __exit__(
        self, kind: object | None, error: object | None, traceback: object | None
    ) -> None: ...

class Sightings:
    """Peers as they were seen at one moment."""

    def participants(self) -> dict[int, tuple[str, int, int, int, bool, int, int, int]]:
        """By slot; what each of them does is asked of /proc now."""

class RingWriter:
    """The writer's end of a ring; holds slot 0 of the segment."""

    def __init__(
        self, ring: RingSegment, ranks: Sequence[int], codec: object, max_extent_bytes: int
    ) -> None: ...
    def send(self, object: object, timeout: float | None) -> None:
        """One object, encoded."""

    def send_encoded(self, encoder: Encoder, timeout: float | None, watch: object | None) -> None:
        """What the encoder has; a blocked call asks `watch` like a `cancel`."""

    def wait_until_read(self, position: int, timeout: object | None) -> bool:
        """
        Whether every reader has finished with the message at `position` by then.
        """

    def write_block(self, owner: object, timeout: float | None) -> ChunkBlock:
        """A block on the next chunk, which it fills by hand."""

    def release_reader(self, reader: int) -> bool:
        """Stops waiting for a reader that is dead or absent; False if it lives."""

    def set_absent_elsewhere(self, count: int) -> None:
        """
        Readers on other hosts that have not attached; the local ones wait for them, too.
        """

    def wait_until_ready(self, timeout: object | None) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything, tells nobody, waits for nobody."""

    def check(self) -> None:
        """Raises if this end is closed or a parent process's."""

    def awaited(self) -> Sightings:
        """Whom a call on this end waits for; a writer is among them."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def position(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def absent_elsewhere(self) -> int: ...
    def participant(self, slot: int) -> tuple[str, int, int, int, bool, int, int, int]: ...
    def counters(self) -> tuple[int, int, int, int]: ...

class RingReader:
    """A reader's end of a ring; holds slot 1 + reader of the segment."""

    def __init__(
        self,
        ring: RingSegment,
        ranks: Sequence[int],
        codec: object,
        reader: int,
        origin: tuple[int, str] | None,
    ) -> None: ...
    def receive(self, timeout: object | None, cancel: object | None, lends: bool = True) -> object:
        """
        The next object, decoded; large arrays are left where they lie if it `lends`.
        """

    def receive_view(
        self, timeout: float | None, cancel: object | None
    ) -> tuple[object, ViewLease | None]:
        """
        The next object, its arrays where they lie, and the lease that they keep (or None).
        """

    def read_block(self, owner: object, timeout: float | None, cancel: object | None) -> ChunkBlock:
        """A block on the next chunk as it is."""

    @property
    def place(self) -> int:
        """Of the reader among the local ones."""

    @property
    def origin(self) -> tuple[int, str] | None:
        """
        If this ring is a relay's: pid and address of the writer whose messages it passes on.
        """

    def wait_until_ready(self, timeout: object | None) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything, tells nobody, waits for nobody."""

    def check(self) -> None:
        """Raises if this end is closed or a parent process's."""

    def awaited(self) -> Sightings:
        """Whom a call on this end waits for; a writer is among them."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def position(self) -> int: ...
    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    @property
    def absent_elsewhere(self) -> int: ...
    def participant(self, slot: int) -> tuple[str, int, int, int, bool, int, int, int]: ...
    def counters(self) -> tuple[int, int, int, int]: ...

class ByteRingSegment(HeldSegment):
    """The shared memory of a ring of bytes."""

    @staticmethod
    def create(bytes: int, id: bytes, name: str) -> ByteRingSegment:
        """
        Makes a segment, of which the first piece is reserved; sweeps what the dead left first.
        """

    @staticmethod
    def attach(bytes: int, name: str) -> ByteRingSegment: ...
    def check(self) -> None:
        """Raises if it is closed or a parent process's."""

    def view(self, offset: int, bytes: int) -> memoryview: ...
    def read_header(self, offset: int) -> tuple[int, int]:
        """Id and size of a chunk; the size is 0 where there is none."""

    @property
    def addresses(self) -> dict[int, int]:
        """By id, of every chunk."""

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
        """Of an empty ring."""

    def allocate(self, bytes: int) -> tuple[int, int] | NoRoom:
        """
        Address and id of a new chunk of so many bytes, header included; its space is taken first.
        """

    def free(self, most: int, is_free: Callable[[int, int, int], bool]) -> list[int]:
        """
        Frees from the oldest on while `is_free(id, offset, bytes)`, of its data, says so.
        """

    def clear(self) -> None:
        """Forgets all chunks."""

    def close(self) -> None: ...
    def abandon(self) -> None: ...

class NoRoom:
    """Why a chunk has no place."""

    def __init__(self, is_obstructed: bool = False) -> None: ...
    @property
    def is_obstructed(self) -> bool:
        """Does somebody still read what was cleared there?"""

def copy_parts(target: object, offset: int, parts: object, bytes: int) -> None:
    """
    Copies `parts`, of so many bytes together, to `target[offset:]`; large ones without the GIL.
    """

class PinnedObject:
    """An object that stays as it is while this or a buffer of it exists."""

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
        """The object, kept as it is; None unless that id is stored there."""

    def is_valid(self, pinned: PinnedObject) -> bool:
        """Was all that was read of it until now its own?"""

    def finish_read(self, pinned: PinnedObject, counts: bool) -> bool:
        """A read is over. False if it was not valid."""

    def count(self, view: object) -> None:
        """One more read, of the object whose 4 count bytes these are."""

    def note_progress(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything, tells nobody."""

    def check(self) -> None:
        """Raises if this end is closed or a parent process's."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def secret(self) -> bytes:
        """32 random bytes that all ends of the storage share."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    def participant(self, slot: int) -> tuple[str, int, int, int, bool, int, int, int]: ...
    def counters(self) -> tuple[int, int, int, int, int, int]:
        """max_objects, puts, hits, evictions, objects, bytes."""

    def outstanding(self) -> list[int]:
        """Reads that each reader still owes."""

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
        """Has every reader read the object with these count bytes so often?"""

    def blockers(self, id: int, references: int) -> list[tuple[int, int, int]]:
        """(slot, reads that it owes, pins) of everybody who keeps the object."""

    def orphan_blockers(self) -> list[tuple[int, int, int]]:
        """The same of orphans."""

    def pin(self, address: object, id: object) -> PinnedObject | None:
        """The object, kept as it is; None unless that id is stored there."""

    def is_valid(self, pinned: PinnedObject) -> bool:
        """Was all that was read of it until now its own?"""

    def finish_read(self, pinned: PinnedObject, counts: bool) -> bool:
        """A read is over. False if it was not valid."""

    def count(self, view: object) -> None:
        """One more read, of the object whose 4 count bytes these are."""

    def note_progress(self) -> None: ...
    def close(self) -> None: ...
    def abandon(self) -> None:
        """Frees everything, tells nobody."""

    def check(self) -> None:
        """Raises if this end is closed or a parent process's."""

    @property
    def is_closed(self) -> bool: ...
    @property
    def secret(self) -> bytes:
        """32 random bytes that all ends of the storage share."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> list[int]: ...
    def participant(self, slot: int) -> tuple[str, int, int, int, bool, int, int, int]: ...
    def counters(self) -> tuple[int, int, int, int, int, int]:
        """max_objects, puts, hits, evictions, objects, bytes."""

    def outstanding(self) -> list[int]:
        """Reads that each reader still owes."""

class Claim:
    """
    A block around a place for an object; left before publish(), there never was one.
    """

    @property
    def id(self) -> int: ...
    def view(self) -> memoryview:
        """Its count bytes, metadata and data."""

    def offer(self) -> None:
        """What was written is an object from now on, without a reference."""

    def publish(self, key: object) -> tuple[int, int]:
        """Its address and id."""

    def __enter__(self) -> Claim: ...
    def __exit__(
        self, kind: object | None, error: object | None, traceback: object | None
    ) -> None: ...

class ObjectIndex:
    """What a storage's writer knows besides the table."""

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
        Keeps these: key -> (address, id), id -> key, id -> references, ids that stay.
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
        Stores an object with one reference, and evicts what is oldest for it; its address and id.
        """

    def claim(self, size: int, is_free: Callable[[int, int, int], bool] | None) -> Claim | NoRoom:
        """The place of an object, to be filled step by step."""

    def refer(self, id: int, references: int) -> None:
        """Sets how often every reader is to read it."""

    def drop_reference(self, id: int, left: int) -> bool:
        """
        Takes one reference back; False, and nothing has changed, if a reader has read it already.
        """

    def free(self, is_free: Callable[[int, int, int], bool] | None) -> list[int]:
        """
        Evicts up to 2 x max_object_size of what the table, or `is_free`, says may go.
        """

class ObjectMemory:
    """The bytes of a stored object, given out piece by piece."""

    def __init__(self, shown: object, is_view: bool, allows_pickle: bool) -> None:
        """
        What `shown` shows, also after its release; pieces lie where they are, or are copied.
        """

    def tree(self) -> bytes:
        """A copy of it."""

    def take_array(self, itemsize: int, shape: object | None, is_writable: bool) -> object:
        """The next piece, for an array. CorruptMessage if so much is not there."""

    def take_bytes(self, length: object) -> bytes | memoryview: ...
    def take_bytearray(self, length: object) -> bytearray: ...
    def take_copy(self, length: object) -> bytearray | Buffer:
        """The next piece, in writable memory of its own."""

    def release(self) -> None:
        """Nothing is left to be taken; what was taken stays."""

    @property
    def allows_pickle(self) -> bool:
        """What it was made with, for who decodes."""

    @property
    def lies(self) -> bool:
        """Are pieces left where they lie?"""

    @lies.setter
    def lies(self, arg: bool, /) -> None: ...

def bytes_at(owner: object, address: int, nbytes: int) -> memoryview:
    """
    So many bytes of the memory of `owner`, which keeps them there; read-only.
    """

class RegionMap:
    """All bytes of a region, as mmap.mmap has them."""

    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """This, and the views that exist already, keep the memory mapped."""

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
        directory: str,
        name: str,
        total_bytes: int,
        blocks: int,
        row_bytes: int,
        cell_bytes: int,
    ) -> None: ...
    def enter(self, seconds: float) -> str:
        """
        One try to create or join it: 'created', 'joined', 'waiting' or 'foreign'.
        """

    def await_space(self, seconds: float) -> str:
        """'complete', 'build' (it is on the caller) or 'waiting'."""

    def publish(self) -> None:
        """All the space is there."""

    def map(self, in_huge_pages: bool) -> None: ...
    def mark_mapped(self, participants: int, seconds: float) -> str:
        """
        Removes the name when that makes so many: 'removed', 'kept' or 'waiting'.
        """

    def leave(self, patience: float) -> tuple[bool, str]:
        """Gives everything up. Was the name removed, and what could not be done?"""

    def region_map(self) -> RegionMap: ...
    def rows(self) -> RegionRows: ...
    def memory(self) -> memoryview: ...
    @property
    def address(self) -> int: ...
    @property
    def fd(self) -> int: ...
    @property
    def allocated(self) -> int:
        """Bytes that have their space."""

    @property
    def free(self) -> int:
        """Bytes of its file system."""

    @property
    def builder(self) -> int:
        """The pid of who reserves the space, or 0."""

    @property
    def is_own(self) -> bool: ...

class Population:
    """Threads that reserve and populate pages; they end with it."""

    def __init__(
        self,
        region: RegionFile,
        offset: int,
        bytes: int,
        stride: int,
        count: int,
        is_builder: bool,
        in_huge_pages: bool,
        threads: int,
    ) -> None: ...
    def wait(self, seconds: float) -> str:
        """'reserved' (once), 'done' or 'working'; raises what went wrong."""

    def stop(self) -> None: ...
    @property
    def done(self) -> int: ...
    @property
    def bytes(self) -> int: ...
    @property
    def was_touched(self) -> bool: ...

def await_bytes(fd: int, bytes: int, seconds: float) -> bool:
    """Is the file so long?"""

def usable_cores() -> int: ...

class BlockArray:
    """Memory as blocks: the first axis counts them."""

    @staticmethod
    def of_buffer(buffer: object) -> BlockArray:
        """Of an object with the buffer protocol, which it holds."""

    @staticmethod
    def at(address: int, shape: Sequence[int], strides: Sequence[int], itemsize: int) -> BlockArray:
        """Memory that the caller keeps; strides in bytes."""

    @property
    def block_bytes(self) -> int: ...
    @property
    def count(self) -> int: ...

def copy_blocks(src: BlockArray, dst: BlockArray, pairs: object, threads: int) -> tuple[int, int]:
    """
    Bytes moved, and how many threads could not be started; 0 threads are as many as pay.
    """

class CudaCopies:
    """Asynchronous copies by the functions of a CUDA run time."""

    def __init__(self, copy: int, copy_2d: int, batch: int, tells_index: bool) -> None:
        """
        Addresses of the functions, 0 for a batch if there is none. Does that tell which it refuses?
        """

    def queue(
        self, src: BlockArray, dst: BlockArray, pairs: object, to_device: bool, stream: int
    ) -> tuple[int, int, int]:
        """Bytes, copies that were queued, and CUDA's error."""

def sweep_dead_segments() -> list[str]:
    """
    Removes the segments of this user that no living process holds; returns their names.
    """

def close_in_children(fd: int) -> int:
    """
    Forked children close that descriptor while it is this file's; returns the inode.
    """

def fork_generation() -> int:
    """
    Another number in each forked child, also of forks by C code; costs no system call.
    """

def keep_in_children(fd: int, inode: int) -> None:
    """Takes that back, when the descriptor is closed."""
