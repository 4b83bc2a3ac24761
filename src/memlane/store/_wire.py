"""The format in which MsgpackSerde writes an object.

    metadata   0  magic (4 bytes; the last one is the version)
               4  length of the tree, little-endian (8 bytes)
               12 the tree, as MessagePack
                  zeros, so that the data starts at a multiple of 64
    data       the bytes of an array (or large bytes object), zeros up to a multiple of 64; the next

The storage places an object after its allocation's header (8 bytes) and 4 count bytes, and its
allocations start at multiples of 64. So with PREAMBLE = 12 every array is aligned in memory.

The tree: text, numbers, bool, None and small bytes are stored as they are; a map is a dict whose
keys are all text. Everything else is an array, a *node*, that starts with one of the tags below. A
node does not record where its data is: nodes are read in the order in which they were written, and
each takes the next bytes.
"""

from __future__ import annotations

import struct
from types import NoneType

ALIGNMENT = 64
PREAMBLE = 8 + 4
MAGIC = b"mls\x03"
HEADER = struct.Struct("<4sQ")
PADDING = tuple(bytes(length) for length in range(ALIGNMENT))

# Leaves that MessagePack returns unchanged, in both modes of reading (bytes are not).
PLAIN = frozenset((str, int, float, bool, NoneType))

# Bytes shorter than this are stored in the tree.
LEAST_BESIDE = 1024

LIST = 0  #           [tag, are all items plain?, items]
TUPLE = 1
SET = 2
FROZENSET = 3
DICT = 4  #           [tag, key, value, key, value, ...]
INTEGER = 5  #        [tag, bytes, little-endian and signed]: beyond 64 bits
TEXT = 6  #           [tag, bytes]: not UTF-8, because of surrogates
COMPLEX = 7  #        [tag, real, imaginary]
BYTES = 8  #          [tag, length]
BYTEARRAY = 9  #      [tag, length]
DATETIME = 10  #      [tag, year, ..., microsecond, fold, time zone]
DATE = 11  #          [tag, year, month, day]
TIME = 12  #          [tag, hour, ..., microsecond, fold, time zone]
TIMEDELTA = 13  #     [tag, days, seconds, microseconds]
TIMEZONE = 14  #      [tag, offset, or offset and name]
ZONE = 15  #          [tag, key]
ARRAY = 16  #         [tag, dtype, shape], and "F" if it is in Fortran order
SCALAR = 17  #        [tag, dtype, bytes]
NUMPY_TEXT = 18  #    [tag, text]
NUMPY_BYTES = 19  #   [tag, bytes]
TENSOR = 20  #        [tag, dtype, shape], and its strides unless they are those of C order
OBJECT = 21  #        [tag, name of the registered type, map of its fields]
PICKLE = 22  #        [tag, lengths of the stream and of each buffer beside it]


def gap_behind_metadata(length: int) -> int:
    """Number of zeros between `length` bytes of metadata and the data."""
    return -(PREAMBLE + length) % ALIGNMENT
