"""The bytes of a segment, as docs/reference/layout.md specifies them, read by pread only.

Nothing is mapped: touching a hole of a mapped file would allocate a page. Every number comes from
memory that other processes write, so offsets and counts are checked before they are used.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from memlane._base.labels import label_in
from memlane._base.slots import PEER, SLOT, PeerFacts, Slot, slots_in
from memlane._base.tier_counters import TIER_COUNTERS

PAGE = 4096
MAJOR = 5
MAGIC = b"MEMLANE1"

_HEADER_BYTES = 1024
_START = struct.Struct("<8sIIQQ16s")
_OFFSET = struct.Struct("<Q")
_OFFSET_AT = 16
_FEATURES = struct.Struct("<Q")
_FEATURES_AT = 48
_SYSTEM = struct.Struct("<II4Q")
_SYSTEM_AT = 64
_ANSWERS = struct.Struct("<16s")
_ANSWERS_AT = 144
_LABEL = struct.Struct("<40s")
_LABEL_AT = 160
_SECTION = struct.Struct("<IIQQQ")
_SECTIONS_AT = 256
_MAX_SECTIONS = 24
_BLOCK = 1 << 20

PARTICIPANTS, STORE_FACTS, OBJECT_TABLE, TIER_FACTS, DELIVERY_TIMES, PEER_FACTS = 1, 5, 6, 8, 9, 10
_SYSTEMS = {1: "queue", 2: "store", 3: "tier", 4: "peers"}
_NEEDS: dict[str, set[int]] = {
    "queue": {PARTICIPANTS},
    "ring": set(),
    "store": {PARTICIPANTS, STORE_FACTS, OBJECT_TABLE},
    "tier": {TIER_FACTS, DELIVERY_TIMES},
    "peers": {PARTICIPANTS, PEER_FACTS},
}

_GLANCE = struct.Struct("<I4xQ16xQ24xQ8xII40x")
_FACTS = struct.Struct("<QQQ32xQQQQQQ")
_DELIVERIES = struct.Struct("<32Q")
_MAX_SLOTS = 1 << 13

LATE_READERS, LATEST_ONLY = 1, 2  # bits of Header.features


class Unreadable(Exception):
    """The reason why a file is not a segment of this version."""


@dataclass(frozen=True)
class Header:
    """A segment's header: which system it belongs to, its geometry, and where its sections are."""

    kind: str
    major: int
    minor: int
    offset: int
    end: int
    id: bytes
    geometry: tuple[int, int, int, int]
    features: int
    answers_to: bytes | None  # id of the queue whose messages those of this one answer
    label: str
    sections: dict[int, tuple[int, int, int]]  # kind: (bytes of an element, offset, elements)


@dataclass(frozen=True)
class StoreFacts:
    """A store's counters."""

    n_readers: int
    max_objects: int
    max_object_size: int
    puts: int
    hits: int
    evictions: int
    objects: int
    bytes: int


def header_at(file: int, offset: int) -> Header | None:
    """The header if it is still there. Raises Unreadable as `header_of`."""
    is_there = os.pread(file, len(MAGIC), offset) == MAGIC
    return _parsed(file, offset) if is_there else None


def header_of(file: int) -> Header | None:
    """The header, wherever it is; None if there is none. Reads the pages that have space, the last
    first: only extents lie behind the header.

    Raises:
        Unreadable: the segment is of another layout version, or damaged.
    """
    for begin, end in reversed(list(_data_of(file))):
        for block in range(begin + (end - 1 - begin) // _BLOCK * _BLOCK, begin - 1, -_BLOCK):
            data = os.pread(file, min(_BLOCK, end - block), block)
            for at in range((len(data) - 1) // PAGE * PAGE, -1, -PAGE):
                is_one = data.startswith(MAGIC, at) and _says_where(data, at, block + at)
                if is_one and (found := _parsed(file, block + at)) is not None:
                    return found
    return None


def _says_where(data: bytes, at: int, offset: int) -> bool:
    """Returns whether it has its own offset in the file: else it is a message that looks like
    one."""
    return data.startswith(_OFFSET.pack(offset), at + _OFFSET_AT)


def _data_of(file: int) -> Iterator[tuple[int, int]]:
    """The parts of the file that have space, in whole pages."""
    at, size = 0, os.fstat(file).st_size
    while at < size:
        try:
            begin = os.lseek(file, at, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        at = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin // PAGE * PAGE, at


def _parsed(file: int, offset: int) -> Header | None:
    data = os.pread(file, _HEADER_BYTES, offset)
    if len(data) < _HEADER_BYTES:
        return None
    _, major, minor, own, end, identity = _START.unpack_from(data)
    if own != offset:  # a message that looks like one
        return None
    if major != MAJOR:
        raise Unreadable(f"layout version {major}; this memlane reads {MAJOR}")
    system, count, *geometry = _SYSTEM.unpack_from(data, _SYSTEM_AT)
    size = os.fstat(file).st_size
    sections = {}
    for number in range(min(count, _MAX_SECTIONS)):
        kind, stride, at, elements, _ = _SECTION.unpack_from(data, _SECTIONS_AT + 32 * number)
        if at + stride * elements > size:
            raise Unreadable("a damaged section directory, or truncated")
        sections[kind] = (stride, at, elements)
    if system not in _SYSTEMS:
        raise Unreadable(f"system {system} is unknown to this memlane")
    kind = _SYSTEMS[system]
    if kind == "store" and OBJECT_TABLE not in sections:
        kind = "ring"
    first, second, third, fourth = geometry
    participants = sections.get(PARTICIPANTS, (0, 0, 0))[2]
    is_whole = sections.keys() >= _NEEDS[kind]
    if kind == "queue":
        is_whole = is_whole and participants == 1 + first > 1
        is_whole = is_whole and 0 < (second + 1 + first) * third <= offset
    elif kind == "peers":
        is_whole = is_whole and participants == 1 + first > 1 and fourth <= 1
    if not is_whole or max(geometry) >= 1 << 62:
        raise Unreadable("a damaged section directory")
    (features,) = _FEATURES.unpack_from(data, _FEATURES_AT)
    (work,) = _ANSWERS.unpack_from(data, _ANSWERS_AT)
    (label,) = _LABEL.unpack_from(data, _LABEL_AT)
    return Header(
        kind,
        major,
        minor,
        offset,
        end,
        identity,
        (first, second, third, fourth),
        features,
        work if any(work) else None,
        label_in(label),
        sections,
    )


def slots_of(file: int, header: Header) -> list[Slot]:
    """All participants' slots, the writer's first.

    Raises:
        Unreadable: the segment is damaged.
    """
    if PARTICIPANTS not in header.sections:
        return []
    return slots_in(_whole(file, header, PARTICIPANTS, SLOT))


def peers_of(file: int, header: Header) -> list[PeerFacts]:
    """Returns what a table of peers has of each participant beside its slot. Raises as
    `slots_of`."""
    return [PeerFacts(*row) for row in PEER.iter_unpack(_whole(file, header, PEER_FACTS, PEER))]


def behind(header: Header, published: int, position: int) -> int:
    """Returns how many messages a reader has yet to take; of the latest that is one."""
    count = max(0, published - position)
    return min(count, 1) if header.features & LATEST_ONLY else count


def _whole(file: int, header: Header, kind: int, element: struct.Struct) -> bytes:
    """All of a section with an element for each slot."""
    stride, at, count = header.sections[kind]
    if stride != element.size or count > _MAX_SLOTS:
        raise Unreadable("a damaged section directory")
    data = os.pread(file, stride * count, at)
    if len(data) < stride * count:
        raise Unreadable("truncated")
    return data


def glance(file: int, header: Header) -> list[tuple[int, int, int, int, int, int]]:
    """(state, pid, skipped, position, activity, views) of each slot, as numbers, for samplers: one
    system call. Empty if the file was cut. `slots_of` has checked the directory."""
    stride, at, count = header.sections[PARTICIPANTS]
    data = os.pread(file, stride * count, at)
    return list(_GLANCE.iter_unpack(data)) if len(data) == stride * count else []


def store_of(file: int, header: Header) -> StoreFacts | None:
    """A store's counters; None if the segment is none."""
    if STORE_FACTS not in header.sections:
        return None
    _, at, _ = header.sections[STORE_FACTS]
    data = os.pread(file, _FACTS.size, at)
    if len(data) < _FACTS.size:
        raise Unreadable("truncated")
    n, objects, size, _, *counters = _FACTS.unpack(data)
    return StoreFacts(n, objects, size, *counters)


def tier_of(file: int, header: Header) -> dict[str, int]:
    """The counters of a pool or a tier, by name; none if the segment is another's."""
    if TIER_FACTS not in header.sections:
        return {}
    stride, at, _ = header.sections[TIER_FACTS]
    own = "disk" if header.geometry[1] > 0 else "pool"
    size = 8 * len(TIER_COUNTERS)
    data = os.pread(file, min(stride, size), at)
    if len(data) < size:
        raise Unreadable("truncated")
    values = struct.unpack_from(f"<{len(TIER_COUNTERS)}Q", data)
    return {
        each.name: value
        for each, value in zip(TIER_COUNTERS, values, strict=True)
        if each.of in ("both", own)
    }


def deliveries_of(file: int, header: Header) -> list[tuple[int, ...]]:
    """Returns for each reader of a queue nanoseconds in total, then how many messages took < 1 us,
    2 us, 4 us, ... and longer than any. The same for stores and loads of a tier. Empty of other
    segments."""
    if DELIVERY_TIMES not in header.sections:
        return []
    return list(_DELIVERIES.iter_unpack(_whole(file, header, DELIVERY_TIMES, _DELIVERIES)))


def blockers_of(file: int, header: Header) -> list[tuple[int, int, int]]:
    """(objects pinned, their bytes, objects of which reads are owed) for each slot of a store.

    Those are what keeps the writer from reusing the space of an object.
    """
    if OBJECT_TABLE not in header.sections:
        return []
    stride, at, count = header.sections[OBJECT_TABLE]
    slots = header.sections.get(PARTICIPANTS, (0, 0, 0))[2]
    if not 0 < slots <= _MAX_SLOTS or not 64 + 8 * slots <= stride <= _BLOCK:
        raise Unreadable("a damaged section directory")
    pinned, nbytes, owed = [0] * slots, [0] * slots, [0] * slots
    for data in _elements(file, stride, at, count):
        for entry in range(0, len(data) - stride + 1, stride):
            stamp, _, size, references = struct.unpack_from("<QQQI", data, entry)
            if not stamp & 1 << 32:
                continue
            usage = struct.unpack_from(f"<{2 * slots}I", data, entry + 64)
            for slot in range(slots):
                if usage[2 * slot + 1] > 0:
                    pinned[slot] += 1
                    nbytes[slot] += size
                owed[slot] += slot > 0 and usage[2 * slot] < references
    return list(zip(pinned, nbytes, owed, strict=True))


def _elements(file: int, stride: int, at: int, count: int) -> Iterator[bytes]:
    """The elements of a section, several at once; those without space, which are 0, left out."""
    most, number = _BLOCK // stride, 0
    while number < count:
        try:
            there = os.lseek(file, at + number * stride, os.SEEK_DATA)
        except OSError:  # only a hole is left
            return
        number = max(number, (there - at) // stride)
        some = min(most, count - number)
        if some > 0:
            yield os.pread(file, stride * some, at + number * stride)
        number += most


def flags_of(file: int, header: Header, position: int) -> tuple[bool, list[bool]]:
    """(written, whether each reader has read it) of the chunk of the message at `position`."""
    n_reader, chunk_bytes, chunks, _ = header.geometry
    at = chunk_bytes * chunks + position % chunks * (1 + n_reader)
    data = os.pread(file, 1 + n_reader, at)
    if len(data) < 1 + n_reader:
        raise Unreadable("truncated")
    return data[0] == 1, [flag == 1 for flag in data[1:]]
