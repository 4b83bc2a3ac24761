"""Handle: what a reader needs to attach to a queue, sent between processes; and what it becomes
there, once, for all ends: an address, checked and frozen."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, Self

from memlane._base.arguments import integer_from, segment_name
from memlane._base.handle_text import check_sequences, check_version, handle_in, handle_text, id_in
from memlane._base.labels import checked_label
from memlane._base.serialization import codec_of
from memlane.broadcast.options import NetworkAddress, endpoint_of
from memlane.broadcast.ring import ring_geometry
from memlane.errors import InvalidArgument, InvalidType, MemlaneError

if TYPE_CHECKING:
    from memlane._base.serialization import Codec
    from memlane._native import RingGeometry, RingSegment
    from memlane.broadcast.options import Endpoint

# Of the handle and of the messages; the writer and its readers must use the same. Raise it for
# whatever an earlier version cannot decode: 5 sends tensors with their strides, 6 has writer_file,
# 7 frames of several messages, 8 has local_openings, 9 has name, 10 has rank.
FORMAT_VERSION = 10


@dataclass(frozen=True)
class RingAddress:
    """A ring in shared memory, and its readers. Raises unless a queue could have made it.

    Attributes:
        name: of its segment.
        queue_id: 16 bytes; a segment of another queue is refused.
        codec: for the messages.
        ranks: of its readers, by place.
        openings: how often each place was opened again; empty: none was.
        writer_file: (pid, descriptor) of the ring in its writer's process, or None.
        origin: (pid, address) of the writer whose messages a relay puts here, or None.
    """

    geometry: RingGeometry
    name: str
    queue_id: bytes
    codec: Codec
    ranks: tuple[int, ...]
    openings: tuple[int, ...] = ()
    writer_file: tuple[int, int] | None = None
    origin: tuple[int, str] | None = None

    def __post_init__(self) -> None:
        segment_name(self.name)
        if self.geometry.n_reader != len(self.ranks):
            raise InvalidArgument(
                f"the handle's ring is for {self.geometry.n_reader} readers, but it names "
                f"{len(self.ranks)} ranks"
            )

    @classmethod
    def of_relay(
        cls,
        name: str,
        ring_id: str,
        ranks: list[int],
        sizes: tuple[int, int],
        codec: Codec,
        origin: tuple[int, str],
    ) -> Self:
        """The ring of a relay; `sizes` are bytes per chunk, and chunks."""
        geometry = ring_geometry(len(ranks), *sizes)
        return cls(geometry, name, id_in("queue_id", ring_id), codec, tuple(ranks), origin=origin)

    def opening(self, place: int) -> int:
        return self.openings[place] if self.openings else 0


@dataclass(frozen=True)
class QueueAddress:
    """A handle that was checked, in the form that ends take: the ring of the readers on the
    writer's host, and the network of the others."""

    ranks: tuple[int, ...]
    ring: RingAddress | None
    network: NetworkAddress | None


def address_in(handle: object) -> QueueAddress:
    """Unpacks `handle`; raises if no queue can have made it."""
    if not isinstance(handle, Handle):
        hint = "; parse its text with Handle.from_json()" if isinstance(handle, str) else ""
        raise InvalidType(f"a Handle is needed, not {type(handle).__name__}{hint}")
    try:
        return handle._unpacked()
    except (TypeError, ValueError, AttributeError) as error:
        if isinstance(error, MemlaneError):
            raise
        raise InvalidArgument(f"this handle was not made by a queue: {error}") from None


@dataclass
class Handle:
    """The address of a queue. Give it to every reader: pickled, or as JSON text.

    Attributes:
        local_reader_ranks: ranks on the writer's host, in the order of their flags in the ring.
        buffer_handle: (n_reader, max_chunk_bytes, max_chunks, name) of the ring; None without
            local readers.
        local_subscribe_addr: always None; local readers need no socket.
        remote_subscribe_addr: `tcp://host:port` for readers on other hosts; None without any.
        remote_addr_ipv6: whether that host is an IPv6 address.
        format_version: of the handle and of the messages.
        queue_id: 32 hexadecimal digits; a segment of another queue is refused.
        serializer: "pickle" or "msgpack", as the writer chose.
        n_remote_reader: number of readers on other hosts.
        remote_liveness: seconds after which an unreachable remote peer counts as dead.
        remote_server_key: the writer's public key, which readers need to begin a handshake; empty
            if the network is plaintext.
        remote_reader_keys: secret keys of all remote readers, or of one.
        writer_file: (pid, descriptor) of the ring in its writer's process, by which a reader may
            attach once the ring has no name any more; else None.
        relay_of: (pid, address) of the writer, in the handle of a relay's ring; else None.
        local_openings: how often `readmit` has opened each local reader's place again; a reader
            attaches with the present number only. Empty: none was.
        name: what people call the queue, or empty.
        rank: of the reader that it was exported for; None: it is for all readers.

    The keys are left out of the repr.
    """

    local_reader_ranks: list[int] = field(default_factory=list)
    buffer_handle: tuple[int, int, int, str] | None = None
    local_subscribe_addr: str | None = None
    remote_subscribe_addr: str | None = None
    remote_addr_ipv6: bool = False
    format_version: int = FORMAT_VERSION
    queue_id: str = ""
    serializer: str = "pickle"
    n_remote_reader: int = 0
    remote_liveness: float = 3.0
    remote_server_key: str = field(default="", repr=False)
    remote_reader_keys: list[str] = field(default_factory=list, repr=False)
    writer_file: tuple[int, int] | None = None
    relay_of: tuple[int, str] | None = None
    local_openings: tuple[int, ...] = ()
    name: str = ""
    rank: int | None = None

    def to_json(self) -> str:
        """The handle as JSON text, for channels that do not carry pickles."""
        return handle_text(self)

    @staticmethod
    def from_json(text: str | bytes) -> Handle:
        """Parses a handle; raises InvalidArgument (a ValueError) if `text` is not one."""
        handle = handle_in(text, Handle, FORMAT_VERSION)
        handle.validate()
        return handle

    def validate(self) -> None:
        """Raises unless every field has a value that a queue could have written."""
        address_in(self)

    def _note_ring(self, geometry: RingGeometry, name: str) -> None:
        self.buffer_handle = (
            geometry.n_reader,
            geometry.max_chunk_bytes,
            geometry.max_chunks,
            name,
        )

    def _note_network(
        self, endpoint: Endpoint, readers: int, liveness: float, server_key: str
    ) -> None:
        self.remote_subscribe_addr = endpoint.text
        self.remote_addr_ipv6 = endpoint.is_ipv6
        self.n_remote_reader = readers
        self.remote_liveness = liveness
        self.remote_server_key = server_key

    def _note_places(self, keys: list[str], ring: RingSegment | None, *, by_file: bool) -> None:
        """Notes by which keys and openings readers attach from now on; `by_file`: the ring may have
        lost its name by then."""
        self.remote_reader_keys = keys
        if ring is not None:
            self.local_openings = tuple(ring.openings())
            if by_file:
                self.writer_file = (os.getpid(), ring.descriptor)

    def _exported(self, rank: int | None, keys: list[str], ring: RingSegment | None) -> Self:
        """The handle as it is sent; None: to every reader."""
        return replace(
            self,
            local_reader_ranks=list(self.local_reader_ranks),
            remote_reader_keys=keys,
            local_openings=() if ring is None else tuple(ring.openings()),
            rank=rank,
        )

    def _unpacked(self) -> QueueAddress:
        check_version(self.format_version, FORMAT_VERSION)
        check_sequences(
            *(self, "local_reader_ranks", "buffer_handle", "local_openings"),
            *("remote_reader_keys", "writer_file", "relay_of"),
        )
        if self.rank is not None:
            checked_rank(self.rank)
        queue_id, codec, ranks = (
            id_in("queue_id", self.queue_id),
            codec_of(self.serializer),
            self._ranks(),
        )
        ring = network = None
        origins = self._openings(), self._writer_file(), self._origin()
        if self.buffer_handle is not None:
            n_reader, max_chunk_bytes, max_chunks, name = self.buffer_handle
            geometry = ring_geometry(n_reader, max_chunk_bytes, max_chunks)
            ring = RingAddress(geometry, name, queue_id, codec, ranks, *origins)
        elif ranks:
            raise InvalidArgument("the handle names local readers, but no ring")
        if self.remote_subscribe_addr is not None:
            if not self.remote_server_key and self.serializer != "msgpack":
                raise InvalidArgument(
                    "the handle has no remote_server_key, as only a queue with "
                    'insecure_network=True and serializer="msgpack" does without, and its '
                    f"serializer is {self.serializer!r}; send the whole handle, as pickle or "
                    f"to_json() give it"
                )
            network = NetworkAddress(
                endpoint_of(self.remote_subscribe_addr),
                self.queue_id,
                codec,
                ranks,
                self.n_remote_reader,
                self.remote_liveness,
                self.remote_server_key,
                self.remote_reader_keys,
                checked_label(self.name or None),
            )
        return QueueAddress(ranks, ring, network)

    def _ranks(self) -> tuple[int, ...]:
        ranks = tuple(checked_rank(rank) for rank in self.local_reader_ranks)
        if len(set(ranks)) != len(ranks):
            raise InvalidArgument(f"the handle names a rank twice: {self.local_reader_ranks}")
        return ranks

    def _openings(self) -> tuple[int, ...]:
        if self.local_openings and len(self.local_openings) != len(self.local_reader_ranks):
            raise InvalidArgument(
                f"the handle has openings of {len(self.local_openings)} places, but names "
                f"{len(self.local_reader_ranks)} local readers"
            )
        return tuple(
            integer_from("an opening in the handle", opening, 0, 2**32 - 1)
            for opening in self.local_openings
        )

    def _writer_file(self) -> tuple[int, int] | None:
        if self.writer_file is None:
            return None
        pid, file = self.writer_file
        return (
            integer_from("the pid in the handle's writer_file", pid, 1, 2**31 - 1),
            integer_from("the descriptor in the handle's writer_file", file, 0, 2**31 - 1),
        )

    def _origin(self) -> tuple[int, str] | None:
        if self.relay_of is None:
            return None
        pid, address = self.relay_of
        if not isinstance(pid, int) or not isinstance(address, str):
            raise InvalidArgument(f"the handle's relay_of names no writer: {self.relay_of!r}")
        return pid, address


def checked_rank(rank: object) -> int:
    """Returns `rank` as an int below 2**63; raises if it is not one."""
    number = integer_from("a rank", rank, 0)
    if number >= 1 << 63:
        raise InvalidArgument(f"a rank must be below 2**63, not {number}")
    return number


def attaching_rank(rank: object, exported_for: int | None, role: str) -> int:
    """The rank that attaches: the given one, or that which the handle was exported for."""
    if rank is None and exported_for is None:
        raise InvalidArgument(
            f"this handle is for every {role}: pass the rank as well, or send export_handle(rank)"
        )
    number = checked_rank(exported_for if rank is None else rank)
    if exported_for not in (None, number):
        raise InvalidArgument(
            f"this handle is {role} {exported_for}'s, not {role} {number}'s: send each {role} its "
            f"own export_handle(rank)"
        )
    return number


class Requests(Protocol):
    """A MessageQueue, whose messages others answer."""

    handle: Handle


def id_of_requests(work: Requests) -> bytes:
    """The id of the queue that `answers` was given; raises InvalidType if it is no MessageQueue."""
    handle = getattr(work, "handle", None)
    if not isinstance(handle, Handle):
        raise InvalidType(f"answers() needs the MessageQueue of the requests, not {work!r}")
    return id_in("queue_id", handle.queue_id)


def checked_ranks(ranks: Sequence[int] | None, count: int) -> list[int]:
    """The ranks of `count` local readers; `range(count)` if `ranks` is None."""
    if ranks is None:
        return list(range(count))
    if not isinstance(ranks, Iterable):
        raise InvalidType(f"local_reader_ranks must be a sequence, not {type(ranks).__name__}")
    checked = [checked_rank(rank) for rank in ranks]
    if len(checked) != count:
        raise InvalidArgument(f"{len(checked)} local_reader_ranks for {count} local readers")
    if len(set(checked)) != count:
        raise InvalidArgument(f"local_reader_ranks names a rank twice: {checked}")
    return checked
