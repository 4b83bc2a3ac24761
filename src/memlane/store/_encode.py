"""Encodes a value as a tree for MessagePack, and pieces of data. See `_wire.py`."""

from __future__ import annotations

import datetime
import io
import pickle
import sys
import zoneinfo
from collections.abc import Callable
from types import NoneType
from typing import Any

import numpy as np

from memlane._base.serialization import Pickler
from memlane._importing import fork_waits
from memlane.errors import InvalidType
from memlane.store import _registered, _wire
from memlane.store._dtypes import describe

Piece = bytes | bytearray | memoryview


# Types stored unchanged, and those among them that are text.
_QUICK = (_wire.PLAIN, frozenset((str,)))
_CLOSER = (frozenset((float, bool, NoneType)), frozenset[type]())


class Encoding:
    """The encoding of one value.

    Integers and texts are assumed to fit MessagePack; if one is refused, the value is encoded again
    with `looks_closer`.
    """

    __slots__ = ("_allows_pickle", "_plain", "_text", "nbytes", "pieces")

    def __init__(self, allows_pickle: bool, looks_closer: bool = False) -> None:
        self.pieces: list[Piece] = []
        self.nbytes = 0
        self._allows_pickle = allows_pickle
        self._plain, self._text = _CLOSER if looks_closer else _QUICK

    def node(self, value: object) -> Any:
        kind = type(value)
        if kind in self._plain:
            return value
        encode = ENCODERS.get(kind)
        return self._other(value) if encode is None else encode(self, value)

    def are_plain(self, values: Any) -> bool:
        return self._plain.issuperset(map(type, values))

    def are_text(self, keys: Any) -> bool:
        return self._text.issuperset(map(type, keys))

    def add(self, piece: Piece, nbytes: int) -> None:
        """Appends `piece` by reference, with its padding."""
        gap = -nbytes % _wire.ALIGNMENT
        self.pieces.append(piece)
        if gap:
            self.pieces.append(_wire.PADDING[gap])
        self.nbytes += nbytes + gap

    def unsupported(self, value: object, why: str) -> list[Any]:
        if not self._allows_pickle:
            raise InvalidType(f"Unsupported object type {type(value)!r}: {why}")
        return self._pickled(value)

    def _other(self, value: object) -> Any:
        kind = type(value)
        registered = _registered.of_type(kind)
        if registered is not None:
            fields = {name: self.node(item) for name, item in registered.items(value)}
            return [_wire.OBJECT, registered.name, fields]
        if isinstance(value, np.generic):
            return _numpy_scalar(self, value)
        if hasattr(sys.modules.get("torch"), "Tensor"):
            with fork_waits:
                from memlane.store import _tensors

            ENCODERS.update(_tensors.ENCODERS)
            if kind in _tensors.ENCODERS:
                return ENCODERS[kind](self, value)
        return self.unsupported(
            value,
            "register a dataclass or msgspec Struct with MsgpackSerde.register_type, in the writer "
            "and in every reader, or use PickleMsgpackSerde",
        )

    def _pickled(self, value: object) -> list[Any]:
        stream = io.BytesIO()
        beside: list[pickle.PickleBuffer] = []
        pickler = Pickler(stream, beside.append)
        pickler.use_torch()
        try:
            pickler.dump(value)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise InvalidType(f"Unsupported object type {type(value)!r}: {error}") from error
        pieces = [stream.getbuffer(), *(buffer.raw() for buffer in beside)]
        for piece in pieces:
            self.add(piece, piece.nbytes)
        return [_wire.PICKLE, [piece.nbytes for piece in pieces]]


def _sequence(tag: int) -> Callable[[Encoding, Any], list[Any]]:
    def encode(encoding: Encoding, value: Any) -> list[Any]:
        if encoding.are_plain(value):
            return [tag, True, value]
        return [tag, False, [encoding.node(item) for item in value]]

    return encode


def _dict(encoding: Encoding, value: dict[Any, Any]) -> Any:
    if encoding.are_text(value):
        if encoding.are_plain(value.values()):
            return value
        return {key: encoding.node(item) for key, item in value.items()}
    node: list[Any] = [_wire.DICT]
    for key, item in value.items():
        node.append(encoding.node(key))
        node.append(encoding.node(item))
    return node


def _int(encoding: Encoding, value: int) -> Any:
    if -(1 << 63) <= value < 1 << 64:
        return value
    return [_wire.INTEGER, value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)]


def _str(encoding: Encoding, value: str) -> Any:
    try:
        value.encode()
    except UnicodeEncodeError:
        return [_wire.TEXT, value.encode(errors="surrogatepass")]
    return value


def _bytes(encoding: Encoding, value: bytes) -> Any:
    if len(value) < _wire.LEAST_BESIDE:
        return value
    encoding.add(value, len(value))
    return [_wire.BYTES, len(value)]


def _bytearray(encoding: Encoding, value: bytearray) -> list[Any]:
    encoding.add(value, len(value))
    return [_wire.BYTEARRAY, len(value)]


def _datetime(encoding: Encoding, value: datetime.datetime) -> list[Any]:
    day = (value.year, value.month, value.day)
    time = (value.hour, value.minute, value.second, value.microsecond)
    return [_wire.DATETIME, *day, *time, value.fold, encoding.node(value.tzinfo)]


def _time(encoding: Encoding, value: datetime.time) -> list[Any]:
    time = (value.hour, value.minute, value.second, value.microsecond)
    return [_wire.TIME, *time, value.fold, encoding.node(value.tzinfo)]


def _zone(encoding: Encoding, value: zoneinfo.ZoneInfo) -> list[Any]:
    if value.key is None:
        return encoding.unsupported(value, "a time zone without a key has no name to send")
    return [_wire.ZONE, value.key]


def _array(encoding: Encoding, array: np.ndarray[Any, Any]) -> list[Any]:
    dtype = array.dtype
    described = describe(dtype)
    if described is None or not dtype.itemsize:
        why = f"its dtype {dtype!r} is not made of numbers, times and bytes alone"
        return encoding.unsupported(array, why)
    node = [_wire.ARRAY, described, array.shape]
    if not array.flags.c_contiguous:
        if array.flags.f_contiguous:
            node.append("F")
        else:
            array = np.ascontiguousarray(array)
    if array.nbytes:
        if dtype.kind not in "biufc":  # the buffer protocol cannot express all other dtypes
            array = array.view(f"V{dtype.itemsize}")
        memory = pickle.PickleBuffer(array).raw()  # type: ignore[arg-type]
        encoding.add(memory, array.nbytes)
    return node


def _numpy_scalar(encoding: Encoding, value: np.generic) -> list[Any]:
    described = describe(value.dtype)
    if described is None or not value.nbytes or type(value) is not value.dtype.type:
        return encoding.unsupported(value, "only numpy's own scalars without objects can be sent")
    return [_wire.SCALAR, described, value.tobytes()]


# By exact type, not for subclasses. torch's types are added once torch is imported.
ENCODERS: dict[type, Callable[[Encoding, Any], Any]] = {
    list: _sequence(_wire.LIST),
    tuple: _sequence(_wire.TUPLE),
    set: _sequence(_wire.SET),
    frozenset: _sequence(_wire.FROZENSET),
    dict: _dict,
    int: _int,
    str: _str,
    complex: lambda _, value: [_wire.COMPLEX, value.real, value.imag],
    bytes: _bytes,
    bytearray: _bytearray,
    datetime.datetime: _datetime,
    datetime.date: lambda _, value: [_wire.DATE, value.year, value.month, value.day],
    datetime.time: _time,
    datetime.timedelta: lambda _, it: [_wire.TIMEDELTA, it.days, it.seconds, it.microseconds],
    datetime.timezone: lambda encoding, value: [
        _wire.TIMEZONE,
        *map(encoding.node, value.__getinitargs__()),
    ],
    zoneinfo.ZoneInfo: _zone,
    np.ndarray: _array,
    np.str_: lambda encoding, value: [_wire.NUMPY_TEXT, encoding.node(str(value))],
    np.bytes_: lambda _, value: [_wire.NUMPY_BYTES, bytes(value)],
}
