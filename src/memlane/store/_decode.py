"""A value of its tree and the data beside it. See `_wire.py`.

Nothing here trusts the bytes: no name is looked up anywhere but in tables, and memory is taken only
for data that is there (`native/bindings/object_memory.hpp`).
"""

from __future__ import annotations

import datetime
import pickle
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np

from memlane._native import ObjectMemory
from memlane.errors import CorruptMessage, InvalidArgument
from memlane.store import _registered, _wire
from memlane.store._dtypes import dtype_of


class Decoding:
    """One value on its way in; its arrays take their memory from `memory`, in the order of nodes."""

    __slots__ = ("allows_pickle", "memory")

    def __init__(self, memory: ObjectMemory, allows_pickle: bool) -> None:
        self.memory = memory
        self.allows_pickle = allows_pickle

    def value(self, node: Any) -> Any:
        kind = type(node)
        if kind in _wire.PLAIN:
            return node
        if kind is list:
            return DECODERS[node[0]](self, node)
        if kind is dict:
            return {
                key: item if type(item) in _wire.PLAIN else self.value(item)
                for key, item in node.items()
            }
        if kind is bytes:
            return memoryview(node) if self.memory.lies else node
        raise CorruptMessage(f"there is a {kind.__name__} in it")

    def hashable(self, node: Any) -> Any:
        """A key or a member of a set: bytes stay bytes, because a memoryview ends with its view."""
        memory = self.memory
        lies, memory.lies = memory.lies, False
        value = self.value(node)
        memory.lies = lies
        return value


def _sequence(kind: type) -> Callable[[Decoding, list[Any]], Any]:
    def decode(decoding: Decoding, node: list[Any]) -> Any:
        _, are_plain, items = _parts(node, 3)
        if type(items) is not list:
            raise CorruptMessage(f"a {kind.__name__} has no items")
        if not are_plain:
            value = decoding.value if kind in (list, tuple) else decoding.hashable
            items = [value(item) for item in items]
        return items if kind is list else kind(items)

    return decode


def _parts(node: list[Any], count: int) -> list[Any]:
    if len(node) != count:
        raise CorruptMessage(f"a node of {count} parts has {len(node)}")
    return node


def _dict(decoding: Decoding, node: list[Any]) -> dict[Any, Any]:
    parts = iter(node)
    next(parts)
    return {
        decoding.hashable(key): decoding.value(item) for key, item in zip(parts, parts, strict=True)
    }


def _content(node: list[Any]) -> bytes:
    """Its last part; many constructors take a number for a size instead."""
    if type(node[-1]) is not bytes:
        raise CorruptMessage(f"there is a {type(node[-1]).__name__} where bytes should be")
    return node[-1]


def _int(decoding: Decoding, node: list[Any]) -> int:
    return int.from_bytes(_content(_parts(node, 2)), "little", signed=True)


def _str(decoding: Decoding, node: list[Any]) -> str:
    return str(_content(_parts(node, 2)), "utf-8", "surrogatepass")


def _complex(decoding: Decoding, node: list[Any]) -> complex:
    _, real, imaginary = _parts(node, 3)
    return complex(real, imaginary)


def _bytes(decoding: Decoding, node: list[Any]) -> bytes | memoryview:
    return decoding.memory.bytes(_parts(node, 2)[1])


def _bytearray(decoding: Decoding, node: list[Any]) -> bytearray:
    return decoding.memory.bytearray(_parts(node, 2)[1])


def _datetime(decoding: Decoding, node: list[Any]) -> datetime.datetime:
    *numbers, fold, zone = _parts(node, 10)[1:]
    return datetime.datetime(*numbers, decoding.value(zone), fold=fold)  # type: ignore[misc]


def _date(decoding: Decoding, node: list[Any]) -> datetime.date:
    return datetime.date(*_parts(node, 4)[1:])


def _time(decoding: Decoding, node: list[Any]) -> datetime.time:
    *numbers, fold, zone = _parts(node, 7)[1:]
    return datetime.time(*numbers, decoding.value(zone), fold=fold)  # type: ignore[misc]


def _timedelta(decoding: Decoding, node: list[Any]) -> datetime.timedelta:
    return datetime.timedelta(*_parts(node, 4)[1:])


def _timezone(decoding: Decoding, node: list[Any]) -> datetime.timezone:
    return datetime.timezone(*(decoding.value(part) for part in node[1:]))


def _zone(decoding: Decoding, node: list[Any]) -> zoneinfo.ZoneInfo:
    key = _parts(node, 2)[1]
    try:
        return zoneinfo.ZoneInfo(key)
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise CorruptMessage(f"there is no time zone {key!r} here: {error}") from error


def _array(decoding: Decoding, node: list[Any]) -> np.ndarray[Any, Any]:
    dtype = dtype_of(node[1])
    shape = node[2]
    memory = decoding.memory.array(dtype.itemsize, shape, False)
    if len(node) == 3:
        return np.ndarray(shape, dtype, memory)  # type: ignore[arg-type]
    return np.ndarray(shape, dtype, memory, order=_parts(node, 4)[3])  # type: ignore[arg-type]


def _scalar(decoding: Decoding, node: list[Any]) -> Any:
    dtype = dtype_of(_parts(node, 3)[1])
    # A scalar with fields refers to its memory, and can be written to.
    return np.ndarray((1,), dtype, bytearray(_content(node)))[0]


def _numpy_text(decoding: Decoding, node: list[Any]) -> np.str_:
    text = decoding.value(_parts(node, 2)[1])
    if type(text) is not str:
        raise CorruptMessage(f"there is a {type(text).__name__} where text should be")
    return np.str_(text)


def _numpy_bytes(decoding: Decoding, node: list[Any]) -> np.bytes_:
    return np.bytes_(_content(_parts(node, 2)))


def _tensor(decoding: Decoding, node: list[Any]) -> Any:
    try:
        from memlane.store import _tensors
    except ImportError as error:
        raise InvalidArgument(
            f"Unsupported object type 'torch.Tensor': this process cannot import torch ({error})"
        ) from error
    DECODERS[_wire.TENSOR] = _tensors.decode
    return _tensors.decode(decoding, node)


def _object(decoding: Decoding, node: list[Any]) -> Any:
    _, name, fields = _parts(node, 3)
    registered = _registered.of_name(name)
    if type(fields) is not dict or fields.keys() != set(registered.fields):
        raise CorruptMessage(
            f"{name!r} has the fields {', '.join(registered.fields)} here, not {', '.join(fields)}"
        )
    return registered.build({key: decoding.value(item) for key, item in fields.items()})


def _pickle(decoding: Decoding, node: list[Any]) -> Any:
    if not decoding.allows_pickle:
        raise InvalidArgument(
            "Unsupported object type: it was pickled, and only PickleMsgpackSerde unpickles"
        )
    stream, *beside = [decoding.memory.copy(nbytes) for nbytes in _parts(node, 2)[1]]
    return pickle.loads(stream, buffers=[memoryview(buffer) for buffer in beside])


DECODERS: dict[int, Callable[[Decoding, list[Any]], Any]] = {
    _wire.LIST: _sequence(list),
    _wire.TUPLE: _sequence(tuple),
    _wire.SET: _sequence(set),
    _wire.FROZENSET: _sequence(frozenset),
    _wire.DICT: _dict,
    _wire.INTEGER: _int,
    _wire.TEXT: _str,
    _wire.COMPLEX: _complex,
    _wire.BYTES: _bytes,
    _wire.BYTEARRAY: _bytearray,
    _wire.DATETIME: _datetime,
    _wire.DATE: _date,
    _wire.TIME: _time,
    _wire.TIMEDELTA: _timedelta,
    _wire.TIMEZONE: _timezone,
    _wire.ZONE: _zone,
    _wire.ARRAY: _array,
    _wire.SCALAR: _scalar,
    _wire.NUMPY_TEXT: _numpy_text,
    _wire.NUMPY_BYTES: _numpy_bytes,
    _wire.TENSOR: _tensor,
    _wire.OBJECT: _object,
    _wire.PICKLE: _pickle,
}
