"""The locks of a segment, looked at without taking one: who lives, and what a region is."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from dataclasses import dataclass

from memlane._base.labels import label_in

LOCK_BASE = 1 << 62  # beyond the end of every file
_LOCK_SPAN = 1 << 32
_F_OFD_GETLK = 36
_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid

# A region's, as native/offload/region_layout.hpp has them.
_PID_SPAN = 1 << 23
_MEMBERS = LOCK_BASE + (1 << 40)
_MOST_MEMBERS = 1 << 16
_LABEL = LOCK_BASE + (1 << 60)
_LABEL_SPAN = 1 << 50
_LABEL_WORDS = 6
_NUMBERS = LOCK_BASE + (1 << 61)
_NUMBER_SPAN = 1 << 59


def _locked(file: int, start: int, length: int) -> tuple[int, int] | None:
    """(start, length) of a lock that another description holds within the range."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)
    try:
        kind, _, begin, held, _ = _FLOCK.unpack(fcntl.fcntl(file, _F_OFD_GETLK, asked))
    except OSError as error:
        if error.errno == errno.EINVAL:  # a file system without such locks
            return None
        raise
    return None if kind == fcntl.F_UNLCK else (begin, held)


def is_slot_held(file: int, slot: int) -> bool:
    """Returns whether the participant in that slot lives."""
    return _locked(file, LOCK_BASE + slot, 1) is not None


def is_held(file: int) -> bool:
    """Returns whether any process uses the segment, as a participant or otherwise."""
    return _locked(file, LOCK_BASE, _LOCK_SPAN) is not None


@dataclass(frozen=True)
class RegionLocks:
    """The plan that the holders of an offload region have agreed on.

    Attributes:
        total_bytes, blocks, row_bytes, cell_bytes: as in `SharedOffloadRegion`.
        holders: their pids, in the order in which they joined.
        label: what people call it, or empty.
    """

    total_bytes: int
    blocks: int
    row_bytes: int
    cell_bytes: int
    holders: tuple[int, ...]
    label: str = ""


def region_of(file: int) -> RegionLocks | None:
    """The region that a file is; None if no process holds one in it."""
    numbers = []
    for field in range(4):
        start = _NUMBERS + field * _NUMBER_SPAN
        # The last field ends where signed offsets do.
        found = _locked(file, start, _NUMBER_SPAN - (field == 3))
        if found is None or found[0] != start:
            return None
        numbers.append(found[1])
    members = _locks_in(file, _MEMBERS, _MEMBERS + _MOST_MEMBERS * _PID_SPAN)
    total, blocks, row, cell = numbers
    holders = tuple(pid for _, pid in members)
    return RegionLocks(total, blocks, row, cell, holders, _label_of(file))


def _label_of(file: int) -> str:
    """Seven letters of seven bits are the length of a lock."""
    letters = bytearray()
    for word in range(_LABEL_WORDS):
        start = _LABEL + word * _LABEL_SPAN
        found = _locked(file, start, _LABEL_SPAN - 1)
        if found is None or found[0] != start:
            break
        letters += bytes(found[1] >> shift & 0x7F for shift in range(0, 49, 7))
    return label_in(bytes(letters))


def _locks_in(file: int, start: int, end: int) -> list[tuple[int, int]]:
    """(start, length) of all locks that begin in the range, by their start.

    The kernel names any of them, so what lies on its two sides is asked for again.
    """
    found, spans = [], [(start, end)]
    while spans:
        left, right = spans.pop()
        if left >= right or (lock := _locked(file, left, right - left)) is None:
            continue
        begin, length = lock
        if left <= begin:
            found.append(lock)
        if len(found) > _MOST_MEMBERS:
            raise ValueError("a region with more locks than members")
        rest = begin + length if length else right  # 0: all that follows
        spans += [(left, begin), (rest, right)]
    return sorted(found)
