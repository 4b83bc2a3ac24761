"""SingleWriterShmRingBuffer: allocations of any size in a ring of shared memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from memlane._base.arguments import MAX_SEGMENT_BYTES, integer, integer_from, segment_name
from memlane._base.guard import Guard
from memlane._base.lifetime import Owned
from memlane._base.segments import SharedMemoryInfo, name_of, new_id, released_after
from memlane._native import ByteRingSegment, NoRoom
from memlane.errors import InvalidArgument, SegmentMissing, StoreFull, WrongRole

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

ID_MAX = 2**31

IsFree = Callable[[int, memoryview], bool]


class SingleWriterShmRingBuffer(Owned):
    """A ring of allocations of any size in shared memory; its creator is the only writer.

    To free it on SIGTERM too, install the handler shown in `help(memlane)`.

    Args:
        data_buffer_size: size of the ring, in bytes.
        name: the segment to attach to; with `create`, the name to use, or None to choose one.
        create: create the segment instead of attaching. Its space is reserved in pieces, as the
            ring grows.

    Attributes:
        data_buffer_size: as above.
        is_writer: whether this object created the ring.
        ID_NBYTES, SIZE_NBYTES, MD_SIZE: bytes of an allocation's id, of its size, and of both.
        ID_MAX: ids are below this, and wrap to 0.

    Raises:
        InvalidArgument: a size below 1, or no name to attach to.
        SegmentExists: the name to create is in use.
        ShmExhausted: /dev/shm has no space for it. Calls that allocate raise it too if other files
            have taken the space since.
        SegmentMissing, SegmentRefused, LayoutMismatch: the named segment cannot be attached to.

    An allocation is 4 bytes of id, 4 bytes of size (including these 8), and data. Only the writer
    knows where allocations are; it gives others an address and an id. A ring alone may free an
    allocation while it is being read; a storage does not.

    Example::

        ring = SingleWriterShmRingBuffer(1 << 16, create=True)
        address, number = ring.allocate_buf(2)
        with ring.access_buf(address) as (memory, _):
            memory[:2] = b"hi"
        ring.close()
    """

    _instead_of_pickling = "send handle(), and make another ring from its two values"
    ID_NBYTES = 4
    ID_MAX = ID_MAX
    SIZE_NBYTES = 4
    MD_SIZE = ID_NBYTES + SIZE_NBYTES

    def __init__(
        self, data_buffer_size: int, name: str | None = None, create: bool = False
    ) -> None:
        size = integer_from("data_buffer_size", data_buffer_size, 1)
        if size > MAX_SEGMENT_BYTES:
            raise InvalidArgument(f"a ring can have at most {MAX_SEGMENT_BYTES} bytes, not {size}")
        if create:
            segment_id = new_id()
            chosen = name_of(segment_id) if name is None else segment_name(name)
            self._take(size, ByteRingSegment.create(size, segment_id, chosen), segment_id)
        elif name is None:
            raise InvalidArgument("pass the name of a ring to attach to, or create=True")
        else:
            self._take(size, ByteRingSegment.attach(size, segment_name(name)))

    @classmethod
    def _attached(cls, size: int, name: str, file: tuple[int, int, bytes] | None) -> Self:
        """Attaches by the name, or, once that is removed, through `file`: the writer's pid, its
        descriptor of the segment, and the segment's id."""
        try:
            return cls(size, name)
        except SegmentMissing:
            if file is None:
                raise
        pid, descriptor, segment_id = file
        ring = cls.__new__(cls)
        ring._take(size, ByteRingSegment.attach_through(pid, descriptor, size, name, segment_id))
        return ring

    def _take(self, size: int, segment: ByteRingSegment, own_id: bytes | None = None) -> None:
        self._segment, self._id = segment, own_id
        self.data_buffer_size = size
        self.is_writer = own_id is not None
        self._name = segment.name
        self._guard = Guard()
        self._own(segment.abandon)

    @property
    def _file(self) -> tuple[int, int, str] | None:
        """(pid, descriptor, id), through which others attach without a name; None in a reader."""
        if self._id is None:
            return None
        return os.getpid(), self._segment.descriptor, self._id.hex()

    # State ----------------------------------------------------------------------------------

    @property
    def monotonic_id_start(self) -> int:
        """The id of the oldest allocation, or of the next one if there is none."""
        return self._segment.id_start

    @monotonic_id_start.setter
    def monotonic_id_start(self, value: int) -> None:
        self._set_next_id(value)

    @property
    def monotonic_id_end(self) -> int:
        """The id of the next allocation. On an empty ring both ids are equal."""
        return self._segment.id_end

    @monotonic_id_end.setter
    def monotonic_id_end(self, value: int) -> None:
        self._set_next_id(value)

    def _set_next_id(self, value: int) -> None:
        number, allocations = integer_from("an id", value, 0), self._segment.count
        if number >= ID_MAX or allocations:
            raise InvalidArgument(
                f"ids must be below 2**31 and can only be set on an empty ring, not {number} on a "
                f"ring of {allocations} allocations"
            )
        self._segment.set_next_id(number)

    @property
    def data_buffer_start(self) -> int:
        """The position (in bytes) of the oldest allocation, or of the gap before it."""
        return self._segment.start

    @property
    def data_buffer_end(self) -> int:
        """The position (in bytes) just past the newest allocation."""
        return self._segment.end

    @property
    def metadata(self) -> dict[int, int]:
        """Id -> address of every allocation, as a snapshot; empty except on the writer."""
        return self._segment.addresses

    @property
    def shared_memory(self) -> SharedMemoryInfo:
        """(name, size, buf) of the whole segment.

        No space is reserved where the ring has not grown yet: touching that part takes space, or
        causes SIGBUS if there is none.
        """
        size = self._segment.size
        return SharedMemoryInfo(self._segment.name, size, self._segment.view(0, size))

    def handle(self) -> tuple[int, str]:
        """(data_buffer_size, name); another process attaches with these. Never raises."""
        return self.data_buffer_size, self._name

    def int2byte(self, integer: int) -> bytes:
        """`integer` as 4 bytes, little-endian and signed; raises OverflowError beyond 4 bytes."""
        return integer.to_bytes(self.ID_NBYTES, "little", signed=True)

    def byte2int(self, byte_data: bytes | memoryview) -> int:
        """The integer in little-endian, signed bytes. Never raises."""
        return int.from_bytes(byte_data, "little", signed=True)

    # The writer -----------------------------------------------------------------------------

    def allocate_buf(self, size: int) -> tuple[int, int]:
        """Returns address and id of a new allocation for `size` bytes of data.

        Raises:
            StoreFull: a MemoryError; there is no room. `free_buf` may make some.
            InvalidArgument: `size` is below 1, or the whole size would exceed 4 signed bytes.
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
            raise InvalidArgument(f"an allocation must be below 2**31 bytes, not {total}")

    def _no_room(self, total: int, is_obstructed: bool) -> StoreFull:
        used = self.data_buffer_end - self.data_buffer_start
        why = (
            "does not fit, because cleared data is still being read; the storage's statistics() "
            "name the readers"
            if is_obstructed
            else f"does not fit contiguously, {used} of {self.data_buffer_size} bytes are in use; "
            f"try calling free_buf() to free up space"
        )
        what = f"an allocation of {total} bytes {why}"
        return StoreFull(f"Not enough space in the data buffer: {what}", total)

    def free_buf(self, is_free_fn: IsFree, nbytes: int | None = None) -> list[int]:
        """Frees allocations, oldest first, while `is_free_fn(id, data_view)` is true.

        Returns their ids. Stops once `nbytes` bytes (in whole allocations; default: the whole ring)
        are freed; they need not be contiguous. If `is_free_fn` raises, allocations freed before
        that stay freed. On a reader, raises `WrongRole`.
        """
        most = self.data_buffer_size
        if nbytes is not None:
            most = min(integer("nbytes", nbytes), most)
        with self._only_writer("free_buf"):
            return self._segment.free(max(0, most), self._shown(is_free_fn))

    def _shown(self, is_free_fn: IsFree) -> Callable[[int, int, int], bool]:
        """`is_free_fn` with a view of the allocation's data in place of its offset and size."""

        def is_free(number: int, offset: int, nbytes: int) -> bool:
            with released_after(self._segment.view(offset, nbytes)) as view:
                return is_free_fn(number, view)

        return is_free

    def clear(self) -> None:
        """Forgets all allocations. Both positions return to 0; ids continue.

        Raises:
            WrongRole: this process did not create the ring.
            ConcurrentUse: another call of the writer is in progress.
        """
        with self._only_writer("clear"):
            self._segment.clear()

    def _only_writer(self, call: str) -> Guard:
        """Guards a call: by the writer only, in its own process, one at a time."""
        self._segment.check()
        if not self.is_writer:
            raise WrongRole(f"Only the writer can {call}")
        return self._guard

    # Everybody ------------------------------------------------------------------------------

    @contextmanager
    def access_buf(self, address: int) -> Iterator[tuple[memoryview, tuple[int, int]]]:
        """Yields a writable view of the data of the allocation at `address`, and its (id, size).

        `size` is the stored one, 8 bytes more than the data.

        Raises:
            InvalidArgument: the address is outside the ring, or no allocation is there.
        """
        address = integer("address", address)
        if not 0 <= address < 2 * self.data_buffer_size:
            raise InvalidArgument(
                f"address {address} is outside the ring: not below {2 * self.data_buffer_size}"
            )
        at = address % self.data_buffer_size
        room = self.data_buffer_size - at
        number, size = self._segment.read_header(at) if room > self.MD_SIZE else (0, 0)
        if not self.MD_SIZE < size <= room:
            raise InvalidArgument(
                f"there is no allocation at address {address}: its size would be {size}, "
                f"{room} bytes are left in the ring"
            )
        with released_after(self._segment.view(at + self.MD_SIZE, size - self.MD_SIZE)) as view:
            yield view, (number, size)

    def close(self) -> None:
        """Frees everything; the creator removes the name. Idempotent. Live views stay readable."""
        self._segment.close()
        self._disown()

    def _end_block(self, _has_failed: bool) -> None:
        self.close()

    def _check(self) -> None:
        self._segment.check()

    def __repr__(self) -> str:
        role = "writer" if self.is_writer else "attached"
        closed = "" if self._segment.is_open else " closed"
        return (
            f"<SingleWriterShmRingBuffer {self._name} {role}{closed}, "
            f"{self.data_buffer_size} bytes, {self._segment.count} allocations>"
        )
