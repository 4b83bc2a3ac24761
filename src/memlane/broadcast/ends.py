"""The two native ends of a queue on one host, each with its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memlane._native import RingGeometry, RingReader, RingSegment, RingWriter
from memlane._segments import name_of
from memlane._serialization import Codec, codec_of
from memlane.errors import RankTaken

if TYPE_CHECKING:
    from collections.abc import Sequence

    from memlane.broadcast.handle import Handle

# Of every chunk this much is reserved when the queue is made, the rest when a message needs it: a
# default queue (10 chunks of 10 MiB) must fit a container's 64 MiB while its messages are small.
RESERVED_CHUNK_BYTES = 64 * 1024


def new_writer(
    geometry: RingGeometry, queue_id: bytes, ranks: Sequence[int], codec: Codec, keep_bytes: int
) -> tuple[RingSegment, RingWriter]:
    """A new segment, and the writer's end of it. Fails whole."""
    segment = RingSegment.create(
        geometry, queue_id, name_of(queue_id), RESERVED_CHUNK_BYTES, slot=0
    )
    try:
        return segment, RingWriter(segment, ranks, codec, keep_bytes)
    except BaseException:
        segment.abandon()  # now, and not when the traceback goes
        raise


def new_reader(
    geometry: RingGeometry, name: str, handle: Handle, rank: int
) -> tuple[RingSegment, RingReader]:
    """The segment `name`, joined, and reader `rank`'s end of it. Fails whole."""
    place = handle.local_reader_ranks.index(rank)
    codec = codec_of(handle.serializer)
    queue_id = bytes.fromhex(handle.queue_id)
    try:
        segment = RingSegment.attach(geometry, name, queue_id, RESERVED_CHUNK_BYTES, slot=1 + place)
        try:
            return segment, RingReader(segment, handle.local_reader_ranks, codec, place)
        except BaseException:
            segment.abandon()  # now, and not when the traceback goes
            raise
    except RankTaken as error:
        raise RankTaken(f"reader {rank} cannot attach: {error}") from None
