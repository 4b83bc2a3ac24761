"""SingleWriterShmRingBuffer: chunks of any size in a ring of shared memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memlane._checks import MAX_SEGMENT_BYTES, integer, integer_from, segment_name
from memlane._native import ByteRingSegment, NoRoom
from memlane._segments import SharedMemoryInfo, name_of, new_id, released_after
from memlane.errors import InvalidArgument, StoreFull, WrongRole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from memlane._native import WriterCall

ID_MAX = 2**31

IsFree = Callable[[int, memoryview], bool]


class SingleWriterShmRingBuffer:
    """A ring of chunks of any size in shared memory; its creator is the only writer.

    To free it on SIGTERM, too, install the handler that `help(memlane)` shows.

    Args:
        data_buffer_size: bytes of the ring.
        name: of the segment. With `create` it is used as it is, or chosen if None.
        create: make the segment instead of attaching to it. Its space is reserved in pieces, as
            the ring grows into it.

    Raises:
        InvalidArgument: a size below 1, or no name to attach to.
        SegmentExists: the name to create is taken by the living.
        ShmExhausted: /dev/shm has no space for it. So does whatever allocates a chunk, if others
            have taken the space since.
        SegmentMissing, SegmentRefused, LayoutMismatch: the named segment cannot be joined.

    A chunk: 4 bytes of id, 4 bytes of its size (these 8 included), data. Where chunks lie is known
    to the writer; others get an address and an id from it. The ring alone keeps nobody from
    reading what is freed meanwhile: that is what a storage is for.
    """

    ID_NBYTES = 4
    ID_MAX = ID_MAX
    SIZE_NBYTES = 4
    MD_SIZE = ID_NBYTES + SIZE_NBYTES

    def __init__(
        self, data_buffer_size: int, name: str | None = None, create: bool = False
    ) -> None:
        size = integer_from("data_buffer_size", data_buffer_size, 1)
        if size > MAX_SEGMENT_BYTES:
            raise InvalidArgument(f"a ring of {size} bytes is more than a file holds")
        if create:
            segment_id = new_id()
            chosen = name_of(segment_id) if name is None else segment_name(name)
            self._segment = ByteRingSegment.create(size, segment_id, chosen)
        elif name is None:
            raise InvalidArgument("a name to attach to is needed, or create=True")
        else:
            self._segment = ByteRingSegment.attach(size, segment_name(name))
        self.data_buffer_size = size
        self.is_writer = bool(create)
        self._name = self._segment.name
        self._finalizer = weakref.finalize(self, self._segment.abandon)

    # State ----------------------------------------------------------------------------------

    @property
    def monotonic_id_start(self) -> int:
        """The id of the oldest chunk, or of the next one if there is none."""
        return self._segment.id_start

    @monotonic_id_start.setter
    def monotonic_id_start(self, value: int) -> None:
        self._set_next_id(value)

    @property
    def monotonic_id_end(self) -> int:
        """The id of the next chunk. On an empty ring both ids are one number."""
        return self._segment.id_end

    @monotonic_id_end.setter
    def monotonic_id_end(self, value: int) -> None:
        self._set_next_id(value)

    def _set_next_id(self, value: int) -> None:
        number, chunks = integer_from("an id", value, 0), self._segment.count
        if number >= ID_MAX or chunks:
            raise InvalidArgument(
                f"ids are below 2**31 and set on an empty ring; {number} on a ring of "
                f"{chunks} chunks"
            )
        self._segment.set_next_id(number)

    @property
    def data_buffer_start(self) -> int:
        """The position of the oldest chunk, or of what was skipped before it."""
        return self._segment.start

    @property
    def data_buffer_end(self) -> int:
        """The position behind the newest chunk."""
        return self._segment.end

    @property
    def metadata(self) -> dict[int, int]:
        """Id -> address of every chunk, as of now; empty but on the writer."""
        return self._segment.addresses

    @property
    def shared_memory(self) -> SharedMemoryInfo:
        """All of it; what the ring has not grown into has no space yet: touching it takes some,
        or ends in SIGBUS if there is none."""
        return SharedMemoryInfo(self._segment.name, self._segment.size, self._segment.whole())

    def handle(self) -> tuple[int, str]:
        """(data_buffer_size, name): what another process attaches by."""
        return self.data_buffer_size, self._name

    def int2byte(self, integer: int) -> bytes:
        """4 bytes, little-endian and signed."""
        return integer.to_bytes(self.ID_NBYTES, "little", signed=True)

    def byte2int(self, byte_data: bytes | memoryview) -> int:
        return int.from_bytes(byte_data, "little", signed=True)

    # The writer -----------------------------------------------------------------------------

    def allocate_buf(self, size: int) -> tuple[int, int]:
        """Address and id of a new chunk for `size` bytes of data.

        Raises:
            StoreFull: a MemoryError; there is no room, `free_buf` may make some.
            InvalidArgument: `size` is below 1, or beyond what 4 signed bytes can say.
        """
        with self._only_writer("allocate_buf"):
            total = integer_from("size", size, 1) + self.MD_SIZE
            self._check_total(total)
            is_too_large = total > self.data_buffer_size
            place = NoRoom() if is_too_large else self._segment.allocate(total)
            if isinstance(place, NoRoom):
                raise self._no_room(total, place.is_obstructed)
            return place

    def _check_total(self, total: int) -> None:
        if self.data_buffer_size >= total >= ID_MAX:
            raise InvalidArgument(f"a chunk has less than 2**31 bytes, not {total}")

    def _no_room(self, total: int, is_obstructed: bool) -> StoreFull:
        used = self.data_buffer_end - self.data_buffer_start
        why = (
            "does not fit where somebody still reads what was cleared; the storage's statistics() "
            "tell who"
            if is_obstructed
            else f"does not fit contiguously, {used} of {self.data_buffer_size} bytes are in use; "
            f"try calling free_buf() to free up space"
        )
        what = f"a chunk of {total} bytes {why}"
        return StoreFull(f"Not enough space in the data buffer: {what}", total)

    def free_buf(self, is_free_fn: IsFree, nbytes: int | None = None) -> list[int]:
        """Frees from the oldest chunk on while `is_free_fn(id, data_view)` says so.

        Stops once `nbytes` (whole chunks; default: the whole ring) are freed, which need not be
        one contiguous space. Returns the ids. If `is_free_fn` raises, what it had allowed before
        stays freed.
        """
        most = self.data_buffer_size
        if nbytes is not None:
            most = min(integer("nbytes", nbytes), most)
        with self._only_writer("free_buf"):
            return self._segment.free(max(0, most), self._shown(is_free_fn))

    def _shown(self, is_free_fn: IsFree) -> Callable[[int, int, int], bool]:
        """The same question about a chunk, whose data it is shown."""

        def is_free(number: int, offset: int, nbytes: int) -> bool:
            with released_after(self._segment.view(offset, nbytes)) as view:
                return is_free_fn(number, view)

        return is_free

    def clear(self) -> None:
        """Forgets all chunks; both positions are 0 again, only the ids go on."""
        with self._only_writer("clear"):
            self._segment.clear()

    def _only_writer(self, call: str) -> WriterCall:
        """One call of the writer at a time, in its own process."""
        self._segment.check()
        if not self.is_writer:
            raise WrongRole(f"Only the writer can {call}")
        return self._segment.writing(call)

    # Everybody ------------------------------------------------------------------------------

    @contextmanager
    def access_buf(self, address: int) -> Iterator[tuple[memoryview, tuple[int, int]]]:
        """The data of the chunk at `address`, writable, and its (id, size).

        `size` is the stored one, 8 more than the data has.

        Raises:
            InvalidArgument: the address is outside the ring, or what lies there is no chunk.
        """
        address = integer("address", address)
        if not 0 <= address < 2 * self.data_buffer_size:
            raise InvalidArgument(
                f"address {address} is outside the ring: below {2 * self.data_buffer_size}"
            )
        at = address % self.data_buffer_size
        room = self.data_buffer_size - at
        number, size = self._segment.read_header(at) if room > self.MD_SIZE else (0, 0)
        if not self.MD_SIZE < size <= room:
            raise InvalidArgument(
                f"there is no chunk at address {address}: its size would be {size}, "
                f"{room} bytes are left in the ring"
            )
        with released_after(self._segment.view(at + self.MD_SIZE, size - self.MD_SIZE)) as view:
            yield view, (number, size)

    def close(self) -> None:
        """Idempotent; the creator removes the name. Views that are still alive stay readable."""
        self._segment.close()
        self._finalizer.detach()

    def __enter__(self) -> Self:
        self._segment.check()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        role = "writer" if self.is_writer else "attached"
        closed = "" if self._segment.is_open else " closed"
        return (
            f"<SingleWriterShmRingBuffer {self._name} {role}{closed}, "
            f"{self.data_buffer_size} bytes, {self._segment.count} chunks>"
        )
