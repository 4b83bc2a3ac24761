"""ShmRingBuffer: a ring's documented bytes, for code that sets the flags itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Literal, cast, get_args

from memlane._base.arguments import MAX_SEGMENT_BYTES, integer_from, segment_name
from memlane._base.lifetime import Owned
from memlane._base.segments import SharedMemoryInfo, name_of, new_id, released_after
from memlane._native import RingGeometry, RingSegment
from memlane.errors import (
    Closed,
    InvalidArgument,
    InvalidType,
    LayoutMismatch,
    MemlaneError,
    Unsupported,
    WrongProcess,
)

if TYPE_CHECKING:
    from typing import Self

RingHandle = tuple[int, int, int, str]
Mode = Literal["all", "latest"]
"""The messages that a reader gets: all of them, or always the latest."""
MODES = get_args(Mode)

# Far beyond any use. Larger numbers are a mistake, and would allocate memory before any other check
# could refuse them.
MAX_READERS = 1 << 16
MAX_CHUNKS = 1 << 22


# More are of no use. Tickets are a message's number times this: at a million a second 64 bits of
# them last for eight years, with few chunks for thousands.
MOST_LATEST_CHUNKS = MAX_READERS + 2


def checked_mode(mode: object, remote_readers: int) -> Mode:
    """`mode`, if it is one, and the readers can have it."""
    if not isinstance(mode, str):
        raise InvalidType(f"mode must be a string, not {type(mode).__name__}")
    if mode not in MODES:
        raise InvalidArgument(f"mode must be {' or '.join(map(repr, MODES))}, not {mode!r}")
    if mode == "latest" and remote_readers:
        raise Unsupported(
            f'mode="latest" is for readers on this host, and {remote_readers} of the readers are '
            f"not local"
        )
    return cast("Mode", mode)


def chunks_for(mode: Mode, n_reader: int, max_chunks: object) -> object:
    """Returns the number of chunks of a queue; `ring_geometry` checks those of the mode "all"."""
    if mode == "all":
        return max_chunks
    return max(integer_from("max_chunks", max_chunks, 1, MOST_LATEST_CHUNKS), n_reader + 2)


def ring_geometry(n_reader: object, max_chunk_bytes: object, max_chunks: object) -> RingGeometry:
    """The geometry of a ring, checked before anything is created."""
    readers = integer_from("n_reader", n_reader, 1)
    chunk = integer_from("max_chunk_bytes", max_chunk_bytes, 1)
    chunks = integer_from("max_chunks", max_chunks, 1)
    if readers > MAX_READERS or chunks > MAX_CHUNKS:
        raise InvalidArgument(
            f"{readers} readers and {chunks} chunks are too many: at most {MAX_READERS} readers "
            f"and {MAX_CHUNKS} chunks"
        )
    if (chunk + 1 + readers) * chunks > MAX_SEGMENT_BYTES:
        raise InvalidArgument(
            f"{chunks} chunks of {chunk} bytes for {readers} readers are too large for a segment: "
            f"at most {MAX_SEGMENT_BYTES} bytes"
        )
    return RingGeometry(readers, chunk, chunks)


def _attached(geometry: RingGeometry, name: str) -> RingSegment:
    segment = RingSegment.attach(geometry, name)
    if segment.is_latest:
        segment.close()
        raise LayoutMismatch(
            f"{name} is of a queue whose readers get the latest message: its flags are not those "
            f"of a ring"
        )
    return segment


class ShmRingBuffer(Owned):
    """A fixed ring of chunks in shared memory: one writer, `n_reader` readers, no locks.

    To free it on SIGTERM too, install the handler shown in `help(memlane)`.

    Args:
        n_reader: number of readers; each has its own flag in every chunk.
        max_chunk_bytes: size of a chunk, in bytes.
        max_chunks: number of chunks.
        name: of the segment to attach to; None creates one, with all its space reserved.

    Raises:
        InvalidArgument: a number below 1, or a ring larger than any file.
        ShmExhausted: /dev/shm has no space for it.
        SegmentMissing, SegmentRefused, LayoutMismatch: the named segment cannot be attached to.

    Layout: chunk `c` lies at `c * max_chunk_bytes`; its flags at `metadata_offset + c *
    metadata_size` (`written`, then one per reader). The writer sets `written` to 0, writes the
    data, sets every reader's flag to 0, then `written` to 1; a reader that sees `written` = 1 and
    its own flag 0 reads the data, then sets its flag to 1. Stores made by Python are not ordered
    on every processor; between processes use `MessageQueue`, whose native ends order theirs.

    Example::

        ring = ShmRingBuffer(n_reader=1, max_chunk_bytes=64, max_chunks=2)
        with ring.get_data(0) as data, ring.get_metadata(0) as flags:
            data[:2], flags[0] = b"hi", 1  # written; the reader's flag is flags[1]
        ring.close()
    """

    def __init__(
        self, n_reader: int, max_chunk_bytes: int, max_chunks: int, name: str | None = None
    ) -> None:
        geometry = ring_geometry(n_reader, max_chunk_bytes, max_chunks)
        if name is None:
            queue_id = new_id()
            segment = RingSegment.create(
                geometry, queue_id, name_of(queue_id), geometry.max_chunk_bytes
            )
        else:
            segment = _attached(geometry, segment_name(name))
        self._setup(geometry, segment.name, segment)

    def _setup(
        self,
        geometry: RingGeometry,
        name: str,
        segment: RingSegment | None,
        close_owner: Callable[[], None] | None = None,
    ) -> None:
        self._geometry = geometry
        self._name = name
        self._segment = segment
        self._close_owner = close_owner
        self._is_closed = False
        if segment is not None and close_owner is None:
            self._own(segment.abandon)

    @classmethod
    def _of_queue(
        cls, geometry: RingGeometry, segment: RingSegment, close: Callable[[], None]
    ) -> Self:
        """The ring of a queue, which owns the segment: closing one closes the other."""
        ring = cls.__new__(cls)
        ring._setup(geometry, segment.name, segment, close)
        return ring

    @classmethod
    def _from_handle(cls, handle: RingHandle) -> Self:
        """Never raises: a handle may pass through a host that does not have the segment."""
        ring = cls.__new__(cls)
        ring._setup(RingGeometry(*handle[:3]), handle[3], None)
        with suppress(MemlaneError, OSError):  # raised again by the first use
            ring._attached()
        return ring

    def __reduce__(self) -> tuple[Callable[[RingHandle], Self], tuple[RingHandle]]:
        return type(self)._from_handle, (self.handle(),)

    def _attached(self) -> RingSegment:
        if self._is_closed or (self._close_owner and not self._segment_is_open()):
            raise Closed("this ring is closed")
        if self._close_owner and self._segment and not self._segment.is_own:
            raise WrongProcess(
                "this ring belongs to a queue of the parent process; make a new queue in the child"
            )
        if self._segment is None:
            self._segment = _attached(self._geometry, self._name)
            self._own(self._segment.abandon)
        return self._segment

    def _segment_is_open(self) -> bool:
        return self._segment is not None and self._segment.is_open

    @property
    def n_reader(self) -> int:
        """Number of readers."""
        return self._geometry.n_reader

    @property
    def max_chunk_bytes(self) -> int:
        """Size of a chunk, in bytes."""
        return self._geometry.max_chunk_bytes

    @property
    def max_chunks(self) -> int:
        """Number of chunks."""
        return self._geometry.max_chunks

    @property
    def metadata_size(self) -> int:
        """Bytes of flags per chunk: `written`, then one for each reader."""
        return self._geometry.metadata_size

    @property
    def total_bytes_of_buffer(self) -> int:
        """Size of the documented part, in bytes; the segment is larger."""
        return self._geometry.total_bytes

    @property
    def data_offset(self) -> int:
        """Offset of the data of chunk 0: always 0."""
        return 0

    @property
    def metadata_offset(self) -> int:
        """Offset of the flags of chunk 0: max_chunk_bytes * max_chunks."""
        return self._geometry.metadata_offset

    @property
    def is_creator(self) -> bool:
        """True if this object created the segment."""
        return self._segment is not None and self._segment.is_creator

    @property
    def shared_memory(self) -> SharedMemoryInfo:
        """(name, size, buf) of the whole segment, memlane's trailer included."""
        segment = self._attached()
        return SharedMemoryInfo(segment.name, segment.size, segment.view(0, segment.size))

    def handle(self) -> RingHandle:
        """(n_reader, max_chunk_bytes, max_chunks, name), with which another process attaches.

        Never raises, even if the ring was closed.
        """
        g = self._geometry
        return g.n_reader, g.max_chunk_bytes, g.max_chunks, self._name

    @contextmanager
    def get_data(self, current_idx: int) -> Iterator[memoryview]:
        """A block on the data of chunk `current_idx`: `max_chunk_bytes` writable bytes.

        Raises:
            InvalidArgument: there is no such chunk.
            Closed: the ring was closed.
            SegmentMissing: the ring came as a pickle, and its segment is not here.
        """
        at = self._chunk_index(current_idx) * self.max_chunk_bytes
        with released_after(self._attached().view(at, self.max_chunk_bytes)) as view:
            yield view

    @contextmanager
    def get_metadata(self, current_idx: int) -> Iterator[memoryview]:
        """A block on the flags of chunk `current_idx`: `metadata_size` writable bytes.

        Raises as `get_data`.
        """
        at = self.metadata_offset + self._chunk_index(current_idx) * self.metadata_size
        with released_after(self._attached().view(at, self.metadata_size)) as view:
            yield view

    def _chunk_index(self, index: int) -> int:
        chunk = integer_from("current_idx", index, 0)
        if chunk >= self.max_chunks:
            raise InvalidArgument(f"there is no chunk {chunk}: the ring has {self.max_chunks}")
        return chunk

    def close(self) -> None:
        """Frees everything; the creator removes the name. Idempotent. Live views stay readable."""
        if self._is_closed:
            return
        if self._close_owner is not None:
            self._close_owner()
        elif self._segment is not None:
            self._segment.close()
        self._disown()
        self._is_closed = True

    def _end_block(self, _has_failed: bool) -> None:
        self.close()

    def _check(self) -> None:
        self._attached()

    def __repr__(self) -> str:
        if self._segment is None:
            state = "closed" if self._is_closed else "not attached"
        else:
            state = "attached" if self._segment.is_open else "closed"
        return (
            f"<ShmRingBuffer {self._name} {state}, {self.n_reader} readers, "
            f"{self.max_chunks} chunks of {self.max_chunk_bytes} bytes>"
        )
