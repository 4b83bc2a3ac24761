"""SingleWriterShmRingBuffer: chunks of any size in a ring of shared memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from memlane._checks import MAX_SEGMENT_BYTES, integer, integer_from, segment_name
from memlane._native import ByteRingSegment
from memlane._segments import SharedMemoryInfo, name_of, new_id, released_after
from memlane.errors import InvalidArgument, ShmExhausted, StoreFull, WrongRole
from memlane.store.positions import ID_MAX, NoRoom, Place, Positions

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from memlane._native import WriterCall

IsFree = Callable[[int, memoryview], bool]


class Tenant(Protocol):
    """Who keeps something in the chunks, and must hear of their end."""

    may_obstruct: bool  # could `obstacle` say anything but 0?

    def obstacle(self, offset: int, nbytes: int) -> int:
        """0 if a new chunk may lie there; else the offset behind what is in its way."""

    def release(self, chunk_id: int) -> bool:
        """The chunk is about to be freed. False keeps it."""

    def forget(self, chunk_id: int) -> None:
        """The chunk did not come to be."""

    def forget_all(self) -> None:
        """All chunks are about to be forgotten."""


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
        self._positions = Positions(size)
        self._tenant: Tenant | None = None
        # What the writer is in the middle of; see `_mend`.
        self._new: int | None = None
        self._ending: int | None = None
        self._is_clearing = False
        # Why the last chunk lies further on, or nowhere: who reads what was cleared; no more space.
        self._finalizer = weakref.finalize(self, self._segment.abandon)

    # State ----------------------------------------------------------------------------------

    @property
    def monotonic_id_start(self) -> int:
        """The id of the oldest chunk, or of the next one if there is none."""
        return self._positions.id_start

    @monotonic_id_start.setter
    def monotonic_id_start(self, value: int) -> None:
        self._positions.id_start = self._checked_id(value)

    @property
    def monotonic_id_end(self) -> int:
        """The id of the next chunk."""
        return self._positions.id_end

    @monotonic_id_end.setter
    def monotonic_id_end(self, value: int) -> None:
        self._positions.id_end = self._checked_id(value)

    def _checked_id(self, value: int) -> int:
        number = integer_from("an id", value, 0)
        if number >= ID_MAX or self._positions.metadata:
            raise InvalidArgument(
                f"ids are below 2**31 and set on an empty ring; {number} on a ring of "
                f"{len(self._positions.metadata)} chunks"
            )
        return number

    @property
    def data_buffer_start(self) -> int:
        """The position of the oldest chunk, or of what was skipped before it."""
        return self._positions.start

    @property
    def data_buffer_end(self) -> int:
        """The position behind the newest chunk."""
        return self._positions.end

    @property
    def metadata(self) -> dict[int, int]:
        """Id -> address of every chunk; empty but on the writer."""
        return self._positions.metadata

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
            self._new = self._positions.id_end
            place = self._place(total)
            if isinstance(place, NoRoom):
                raise place.shortage or _no_room(self._positions, total, place.is_obstructed)
            self._new = None
            return place

    def _place(self, total: int) -> Place | NoRoom:
        """A new chunk, behind what the tenant does not give away."""
        size, positions = self.data_buffer_size, self._positions
        if size >= total >= ID_MAX:
            raise InvalidArgument(f"a chunk has less than 2**31 bytes, not {total}")
        is_obstructed, shortage = False, None
        place, is_first = positions.allocate(total), True
        while place is not None:
            at = place.address % size
            tenant, end = self._tenant, 0
            if tenant is not None and tenant.may_obstruct:
                end = tenant.obstacle(at, total)
            if end == 0:
                try:
                    self._segment.write_header(at, place.id, total)
                    return place
                except ShmExhausted as error:  # the ring cannot grow: for now it ends here
                    shortage, end = error, size
            else:
                is_obstructed = True
            positions.undo()
            # An empty ring has room everywhere, wherever its positions are.
            goes_back, is_first = is_first and not positions.metadata, False
            place = positions.allocate(
                total, 0 if goes_back else place.address - at + min(end, size)
            )
        return NoRoom(is_obstructed, shortage)

    def free_buf(self, is_free_fn: IsFree, nbytes: int | None = None) -> list[int]:
        """Frees from the oldest chunk on while `is_free_fn(id, data_view)` says so.

        Stops once `nbytes` (whole chunks; default: the whole ring) are freed, which need not be
        one contiguous space. Returns the ids. If `is_free_fn` raises, what it had allowed before
        stays freed.
        """
        most = self.data_buffer_size if nbytes is None else integer("nbytes", nbytes)
        with self._only_writer("free_buf"):
            return self._free(self._shown(is_free_fn), most)

    def _shown(self, is_free_fn: IsFree) -> Callable[[int], bool]:
        """The same question about the oldest chunk, whose data it is shown."""

        def is_free(number: int) -> bool:
            at = self._positions.metadata[number] % self.data_buffer_size + self.MD_SIZE
            view = self._segment.view(at, self._positions.oldest_size() - self.MD_SIZE)
            with released_after(view):
                return is_free_fn(number, view)

        return is_free

    def _free(self, is_free: Callable[[int], bool], most: int) -> list[int]:
        positions, freed, sum_freed = self._positions, [], 0
        while positions.metadata and sum_freed < most:
            number, total = positions.id_start, positions.oldest_size()
            if not is_free(number):
                break
            self._ending = number
            if not self._end_oldest(number):
                break
            sum_freed += total
            freed.append(number)
        return freed

    def _end_oldest(self, number: int) -> bool:
        """False if the tenant keeps it. May be done again when it was interrupted."""
        is_free = self._tenant is None or self._tenant.release(number)
        if is_free:
            self._positions.free_oldest()
        self._ending = None
        return is_free

    def clear(self) -> None:
        """Forgets all chunks; both positions are 0 again, only the ids go on."""
        with self._only_writer("clear"):
            self._clear()

    def _clear(self) -> None:
        self._is_clearing = True
        if self._tenant is not None:
            self._tenant.forget_all()
        self._positions.clear()
        self._is_clearing = False

    def _only_writer(self, call: str) -> WriterCall:
        """One call of the writer at a time, in its own process."""
        self._segment.check()
        if not self.is_writer:
            raise WrongRole(f"Only the writer can {call}")
        return self._segment.writing(call, self._mend)

    def _mend(self) -> None:
        """Comes after a call that raised: ends what it was in the middle of, or takes it back.

        A signal handler may raise behind any step of a call, and so of this one, which then comes
        again before the next call: all that it does can be done twice.
        """
        positions = self._positions
        if self._is_clearing:
            self._clear()
        if self._ending is not None and self._ending in positions.metadata:
            self._end_oldest(self._ending)
        self._ending = None
        if self._new is not None:
            if self._tenant is not None:
                self._tenant.forget(self._new)
            if self._new in positions.metadata:
                positions.undo()
        self._new = None

    # Everybody ------------------------------------------------------------------------------

    @contextmanager
    def access_buf(self, address: int) -> Iterator[tuple[memoryview, tuple[int, int]]]:
        """The data of the chunk at `address`, writable, and its (id, size).

        `size` is the stored one, 8 more than the data has.

        Raises:
            InvalidArgument: the address is outside the ring, or what lies there is no chunk.
        """
        with self._chunk(integer("address", address)) as chunk:
            yield chunk

    @contextmanager
    def _chunk(self, address: int) -> Iterator[tuple[memoryview, tuple[int, int]]]:
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
            f"{self.data_buffer_size} bytes, {len(self.metadata)} chunks>"
        )


def _no_room(positions: Positions, total: int, is_obstructed: bool) -> StoreFull:
    if is_obstructed:
        return StoreFull(
            f"Not enough space in the data buffer: where a chunk of {total} bytes would lie "
            f"somebody still reads what was cleared; the storage's statistics() tell who",
            total,
        )
    used = positions.end - positions.start
    return StoreFull(
        f"Not enough space in the data buffer: a chunk of {total} bytes does not fit "
        f"contiguously, {used} of {positions.size} bytes are in use; try calling "
        f"free_buf() to free up space",
        total,
    )
