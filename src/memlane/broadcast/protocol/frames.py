"""The frames between a writer and its readers on other hosts.

Every frame begins with a header, little-endian:

    offset  bytes
    0       3      "mlq"
    3       1      version
    4       1      type of frame (`What`)
    5       1      kind of a message, as in a ring's chunk (`Kind`)
    6       2      0
    8       8      epoch of the writer; 0 in a reader's first frame
    16      8      sequence of the message, or of the next one
    24      4      piece of the message
    28      4      pieces of the message
    32      8      offset of the piece in the message
    40      8      bytes of the message

The payload of a message of at most `SMALL` bytes follows in the same ZeroMQ part, and behind it may
be the next such messages, each with its header. A larger message is sent in pieces of at most
`PIECE` bytes, so that libzmq encrypts one while its peer decrypts the previous one; the payload of
a piece is a second part, so that it can be sent without a copy.
All other frames are control frames, whose body, if any, is MessagePack.
"""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Annotated, Any, NamedTuple

from memlane._base.msgspec import msgspec
from memlane.errors import CorruptMessage

VERSION = 6
SMALL = 32 * 1024
PIECE = 512 * 1024
MOST_CONTROL = 4 * 1024
"""Size limit of control frames, in bytes; readers send no other frames."""

_HEADER = Struct("<3sBBBHQQIIQQ")
HEADER_BYTES = _HEADER.size
_MAGIC = b"mlq"
_BEGIN = _MAGIC + bytes([VERSION])


class What(IntEnum):
    """The type of a frame. The writer sends those below 16, readers the others and END."""

    MESSAGE = 1
    WELCOME = 2  # answers HELLO; the stream begins where that asked for
    READY = 3  # everybody has attached
    ABSENT = 4  # answers ASK: the absent readers
    END = 5  # there is no message with this sequence; repeated until the reader returns it
    REFUSED = 6
    SEEN = 7  # answers REPORT: the writer knows that this reader reads from its relay's ring
    LEFT = 8  # answers BYE, with the number of the latest HELLO as its sequence
    AGAIN = 9  # an acknowledgement may have been lost: send it again
    HELLO = 16  # repeated until it is answered
    ACK = 17  # everything before this sequence was taken
    ASK = 18  # repeated until READY
    BYE = 19  # repeated until it is answered
    REPORT = 20  # a relay's, about its readers; or such a reader's, that it is in the ring


class Kind(IntEnum):
    """The encoding of a message; `ChunkKind` in `native/broadcast/ring_layout.hpp`."""

    RAW = 0
    OBJECT = 1
    FRAMES = 2
    PLAIN = 3
    BYTES = 4


class Header(NamedTuple):
    """The header of one frame; its fields are those of the table above."""

    what: int
    epoch: int
    sequence: int = 0
    kind: int = 0
    piece: int = 0
    pieces: int = 0
    offset: int = 0
    total: int = 0

    def pack(self) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            VERSION,
            self.what,
            self.kind,
            0,
            self.epoch,
            self.sequence,
            self.piece,
            self.pieces,
            self.offset,
            self.total,
        )


def whole_header(epoch: int, sequence: int, kind: int, total: int) -> bytes:
    """The packed header of a message in one piece; faster than `Header`."""
    return _HEADER.pack(_MAGIC, VERSION, 1, kind, 0, epoch, sequence, 0, 1, 0, total)


class OtherVersion(CorruptMessage):
    """The frame's first bytes are not this version's. `is_memlane`: they are those of another
    version of memlane."""

    def __init__(self, begin: bytes) -> None:
        self.is_memlane = begin[:-1] == _MAGIC
        self._theirs = f"another protocol (its frames begin with {begin!r})"
        if self.is_memlane:
            self._theirs = f"version {begin[-1]} of the protocol between hosts"
        super().__init__(self.text("the peer"))

    def text(self, peer: str) -> str:
        """Returns the error's text."""
        return (
            f"{peer} speaks {self._theirs}, this process version {VERSION}; use the same version "
            f"of memlane on both sides"
        )


def _check_version(part: bytes | memoryview) -> None:
    if len(part) >= len(_BEGIN) and part[: len(_BEGIN)] != _BEGIN:
        raise OtherVersion(bytes(part[: len(_BEGIN)]))


def header_of(part: bytes | memoryview) -> Header:
    """The header at the beginning of a frame; CorruptMessage if there is none."""
    if len(part) < HEADER_BYTES:
        raise CorruptMessage(f"a frame of {len(part)} bytes is shorter than its header")
    _check_version(part)
    _, _, what, kind, _, epoch, sequence, piece, pieces, offset, total = _HEADER.unpack_from(part)
    return Header(what, epoch, sequence, kind, piece, pieces, offset, total)


def messages_of(part: bytes) -> list[tuple[Header, memoryview]]:
    """The small messages of a frame, each with its header; CorruptMessage if it has other bytes."""
    found: list[tuple[Header, memoryview]] = []
    rest = memoryview(part)
    while rest:
        header = header_of(rest)
        end = HEADER_BYTES + header.total
        if header.what != What.MESSAGE or header.pieces != 1 or end > len(rest):
            raise CorruptMessage(f"a frame has bytes of no message after {len(found)} messages")
        found.append((header, rest[HEADER_BYTES:end]))
        rest = rest[end:]
    return found


Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A reader's introduction, and where its stream should begin."""

    queue_id: str
    rank: int
    pid: int
    session: Annotated[bytes, msgspec.Meta(min_length=1)]  # random; the same when it comes back
    token: str  # proves the place if the connection does not (without CURVE)
    taken: Count  # messages before this sequence were taken
    sequence: Count  # the first frame that is wanted
    piece: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    host: str  # readers with the same text may share memory; empty: shares none
    is_behind: bool = False  # it reads from a relay's ring, and wants no stream
    number: Count = 0  # of this HELLO; only the answer to the latest one counts


class Ring(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The ring of a relay. Its places are those of all remote readers of the queue."""

    place: int  # of the reader that gets this
    ranks: list[int]  # by place, as far as they are known
    max_chunk_bytes: int
    max_chunks: int
    name: str = ""  # empty: the reader makes the ring, and relays
    ring_id: str = ""


class ReportRow(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """One reader behind a relay."""

    place: int
    pid: int
    state: str  # as in `ReaderStatistics`
    taken: int  # messages before this sequence were taken


class Report(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A relay's rows on the readers of its ring, its own included, and where that ring is."""

    name: str
    ring_id: str
    rows: list[ReportRow]


class Welcome(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The facts that a reader must know of its writer."""

    pid: int
    window: int
    window_bytes: int
    number: int = 0  # of the HELLO that this answers
    ring: Ring | None = None  # to make or read from; None: messages come on this connection


class Refused(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The reason why a reader may not attach or reconnect; `code` is the kind of reason."""

    code: str
    text: str


class Absent(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """The readers that have not attached: some by name, the free places, and how many on the
    writer's host."""

    names: list[str]
    places: list[int]
    beside: int


def control(header: Header, body: msgspec.Struct | None = None) -> bytes:
    """Packs a control frame."""
    return header.pack() + (b"" if body is None else msgspec.msgpack.encode(body))


_BODIES: dict[int, type[msgspec.Struct]] = {
    What.HELLO: Hello,
    What.WELCOME: Welcome,
    What.REFUSED: Refused,
    What.ABSENT: Absent,
    What.REPORT: Report,
}


def parsed(part: bytes) -> tuple[Header, Any]:
    """Parses a frame: its header, and the body of a control frame that has one, else None.

    Raises:
        CorruptMessage: there is no header, or the body is not what the header announces.
    """
    _check_version(part)  # another version's header may be shorter
    header = header_of(part)
    kind = _BODIES.get(header.what)
    if kind is None:
        return header, None
    try:
        return header, msgspec.msgpack.decode(memoryview(part)[HEADER_BYTES:], type=kind)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise CorruptMessage(f"a frame is not a valid {kind.__name__}: {error}") from None
