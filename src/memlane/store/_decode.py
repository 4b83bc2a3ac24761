"""Decodes a value from its tree and data. See `_wire.py`.

The bytes are not trusted: names are looked up in tables only, and memory is allocated only for data
that is present (`native/bindings/store/object_memory.hpp`).
"""

from __future__ import annotations

import datetime
import pickle
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np

from memlane._importing import fork_waits
from memlane._native import ObjectMemory
from memlane.errors import CorruptMessage, InvalidArgument
from memlane.store import _registered, _wire
from memlane.store._dtypes import dtype_of


def value_of(memory: ObjectMemory, node: Any) -> Any:
    """The value of a node; its arrays take the next pieces of `memory`."""
    kind = type(node)
    if kind in _wire.PLAIN:
        return node
    if kind is list:
        return DECODERS[node[0]](memory, node)
    if kind is dict:
        return {
            key: item if type(item) in _wire.PLAIN else value_of(memory, item)
            for key, item in node.items()
        }
    if kind is bytes:
        return memoryview(node) if memory.is_in_place else node
    raise CorruptMessage(f"the object has an unknown part: {kind.__name__}")


def _hashable(memory: ObjectMemory, node: Any) -> Any:
    """A key or set member. Bytes stay bytes: a memoryview would be valid only in its block."""
    is_in_place, memory.is_in_place = memory.is_in_place, False
    value = value_of(memory, node)
    memory.is_in_place = is_in_place
    return value


def _sequence(kind: type) -> Callable[[ObjectMemory, list[Any]], Any]:
    def decode(memory: ObjectMemory, node: list[Any]) -> Any:
        _, are_plain, items = _parts(node, 3)
        if type(items) is not list:
            raise CorruptMessage(f"the items of a {kind.__name__} are not a list")
        if not are_plain:
            value = value_of if kind in (list, tuple) else _hashable
            items = [value(memory, item) for item in items]
        return items if kind is list else kind(items)

    return decode


def _parts(node: list[Any], count: int) -> list[Any]:
    if len(node) != count:
        raise CorruptMessage(f"a node has {len(node)} parts, not {count}")
    return node


def _dict(memory: ObjectMemory, node: list[Any]) -> dict[Any, Any]:
    parts = iter(node)
    next(parts)
    return {
        _hashable(memory, key): value_of(memory, item)
        for key, item in zip(parts, parts, strict=True)
    }


def _content(node: list[Any]) -> bytes:
    """The last part of `node`, which must be bytes: many constructors treat a number as a size."""
    if type(node[-1]) is not bytes:
        raise CorruptMessage(f"bytes were expected, not {type(node[-1]).__name__}")
    return node[-1]


def _datetime(memory: ObjectMemory, node: list[Any]) -> datetime.datetime:
    *numbers, fold, zone = _parts(node, 10)[1:]
    return datetime.datetime(*numbers, value_of(memory, zone), fold=fold)  # type: ignore[misc]


def _time(memory: ObjectMemory, node: list[Any]) -> datetime.time:
    *numbers, fold, zone = _parts(node, 7)[1:]
    return datetime.time(*numbers, value_of(memory, zone), fold=fold)  # type: ignore[misc]


def _zone(memory: ObjectMemory, node: list[Any]) -> zoneinfo.ZoneInfo:
    key = _parts(node, 2)[1]
    try:
        return zoneinfo.ZoneInfo(key)
    except (LookupError, OSError, TypeError, ValueError) as error:
        raise CorruptMessage(f"there is no time zone {key!r} here: {error}") from error


def _array(memory: ObjectMemory, node: list[Any]) -> np.ndarray[Any, Any]:
    dtype = dtype_of(node[1])
    shape = node[2]
    piece: Any = memory.take_array(dtype.itemsize, shape, False)
    if len(node) == 3:
        return np.ndarray(shape, dtype, piece)
    return np.ndarray(shape, dtype, piece, order=_parts(node, 4)[3])


def _scalar(memory: ObjectMemory, node: list[Any]) -> Any:
    dtype = dtype_of(_parts(node, 3)[1])
    # A bytearray, because a scalar with fields is a writable alias of its memory.
    scalars = np.ndarray((1,), dtype, bytearray(_content(node)))
    try:
        return scalars[0]
    except SystemError as error:  # numpy's error for invalid text
        raise CorruptMessage(f"a scalar is not a valid {dtype}: {error}") from error


def _numpy_text(memory: ObjectMemory, node: list[Any]) -> np.str_:
    text = value_of(memory, _parts(node, 2)[1])
    if type(text) is not str:
        raise CorruptMessage(f"text was expected, not {type(text).__name__}")
    return np.str_(text)


def _tensor(memory: ObjectMemory, node: list[Any]) -> Any:
    try:
        with fork_waits:
            from memlane.store import _tensors
    except ImportError as error:
        raise InvalidArgument(
            f"Unsupported object type 'torch.Tensor': this process cannot import torch ({error})"
        ) from error
    DECODERS[_wire.TENSOR] = _tensors.decode
    return _tensors.decode(memory, node)


def _object(memory: ObjectMemory, node: list[Any]) -> Any:
    _, name, fields = _parts(node, 3)
    registered = _registered.of_name(name)
    if type(fields) is not dict or fields.keys() != set(registered.fields):
        raise CorruptMessage(
            f"{name!r} has the fields {', '.join(registered.fields)} here, not {', '.join(fields)}"
        )
    return registered.build({key: value_of(memory, item) for key, item in fields.items()})


def _pickle(memory: ObjectMemory, node: list[Any]) -> Any:
    if not memory.allows_pickle:
        raise InvalidArgument(
            "Unsupported object type: it was pickled, and only PickleMsgpackSerde unpickles"
        )
    pieces: list[Any] = [memory.take_copy(nbytes) for nbytes in _parts(node, 2)[1]]
    stream, *beside = pieces
    return pickle.loads(stream, buffers=[memoryview(buffer) for buffer in beside])


DECODERS: dict[int, Callable[[ObjectMemory, list[Any]], Any]] = {
    _wire.LIST: _sequence(list),
    _wire.TUPLE: _sequence(tuple),
    _wire.SET: _sequence(set),
    _wire.FROZENSET: _sequence(frozenset),
    _wire.DICT: _dict,
    _wire.INTEGER: lambda _, node: int.from_bytes(_content(_parts(node, 2)), "little", signed=True),
    _wire.TEXT: lambda _, node: str(_content(_parts(node, 2)), "utf-8", "surrogatepass"),
    _wire.COMPLEX: lambda _, node: complex(*_parts(node, 3)[1:]),
    _wire.BYTES: lambda memory, node: memory.take_bytes(_parts(node, 2)[1]),
    _wire.BYTEARRAY: lambda memory, node: memory.take_bytearray(_parts(node, 2)[1]),
    _wire.DATETIME: _datetime,
    _wire.DATE: lambda _, node: datetime.date(*_parts(node, 4)[1:]),
    _wire.TIME: _time,
    _wire.TIMEDELTA: lambda _, node: datetime.timedelta(*_parts(node, 4)[1:]),
    _wire.TIMEZONE: lambda memory, node: datetime.timezone(
        *(value_of(memory, p) for p in node[1:])
    ),
    _wire.ZONE: _zone,
    _wire.ARRAY: _array,
    _wire.SCALAR: _scalar,
    _wire.NUMPY_TEXT: _numpy_text,
    _wire.NUMPY_BYTES: lambda _, node: np.bytes_(_content(_parts(node, 2))),
    _wire.TENSOR: _tensor,
    _wire.OBJECT: _object,
    _wire.PICKLE: _pickle,
}
