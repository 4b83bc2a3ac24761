"""Objects as they are stored in a ring, and whether two values are exactly equal."""

import dataclasses
import datetime
import struct
import sys
from typing import Any

import msgspec
import numpy as np

from memlane.store.serde import MsgpackSerde, ObjectSerde, PickleMsgpackSerde

PREAMBLE = 12  # bytes before a chunk's content: id, size, read count

MSGPACK = MsgpackSerde()
PICKLE = PickleMsgpackSerde()


def laid(serde: ObjectSerde, value: object, *, behind: int = 0) -> memoryview:
    """Returns what a reader gets: metadata and data, in a chunk that starts at a multiple of 64."""
    data, nbytes, metadata, metadata_nbytes = serde.serialize(value)
    parts = data if isinstance(data, list) else [data]
    assert type(metadata) is bytes
    assert metadata_nbytes == len(metadata)
    assert nbytes == sum(memoryview(part).nbytes for part in parts)
    return in_chunk(metadata + b"".join(parts) + bytes(behind))


def in_chunk(content: bytes) -> memoryview:
    memory = bytearray(64 + PREAMBLE + len(content))
    start = -np.frombuffer(memory, np.uint8).ctypes.data % 64 + PREAMBLE
    memory[start : start + len(content)] = content
    return memoryview(memory)[start : start + len(content)].toreadonly()


def both_ways(value: object, serde: ObjectSerde = MSGPACK) -> tuple[Any, Any]:
    """The value by copy and by view."""
    lying = laid(serde, value)
    return serde.deserialize(lying), serde.deserialize_view(lying)


def exported(value: object) -> tuple[bytearray, Any]:
    """Memory, and the value as a view of it, made through a memoryview that is released."""
    memory = bytearray(laid(MSGPACK, value))
    with memoryview(memory) as whole, whole.toreadonly() as lying:
        return memory, MSGPACK.deserialize_view(lying)


def is_in_use(memory: bytearray) -> bool:
    """Returns whether the memory is exported now, before any garbage collection."""
    try:
        memory.append(0)
    except BufferError:
        return True
    return False


def exact(value: Any) -> Any:
    """A key that only indistinguishable values share. A memoryview counts as bytes."""
    kind = type(value)
    if kind is dict:
        return kind, tuple((exact(key), exact(item)) for key, item in value.items())
    if kind in (list, tuple):
        return kind, tuple(map(exact, value))
    if kind in (set, frozenset):
        return kind, frozenset(map(exact, value))
    if kind is float:
        return kind, struct.pack("d", value)
    if kind is complex:
        return kind, struct.pack("dd", value.real, value.imag)
    if kind in (bytes, memoryview):
        return bytes, bytes(value)
    if kind is bytearray:
        return kind, bytes(value)
    if kind is np.ndarray:
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        return kind, _exact_dtype(value.dtype), value.shape, fortran, value.tobytes()
    if isinstance(value, np.generic):
        return kind, _exact_dtype(value.dtype), value.tobytes()
    if isinstance(value, (datetime.datetime, datetime.time)):
        return kind, repr(value), type(value.tzinfo)
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return kind, tuple(exact(getattr(value, name)) for name in names)
    if isinstance(value, msgspec.Struct):
        return kind, tuple(exact(getattr(value, name)) for name in value.__struct_fields__)
    if "torch" in sys.modules and kind is sys.modules["torch"].Tensor:
        return _exact_tensor(value)
    return kind, repr(value)


def _exact_dtype(dtype: np.dtype[Any]) -> Any:
    if dtype.names is None:
        return dtype.char, dtype.byteorder, str(dtype)
    return repr(dtype), dtype.itemsize, dtype.isalignedstruct, str(dtype.fields)


def _exact_tensor(tensor: Any) -> Any:
    import torch

    content = b""
    if number := tensor.numel():  # one element may have any stride, which `view` refuses
        flat = tensor.detach().reshape(-1).contiguous().as_strided((number,), (1,))
        content = flat.view(torch.uint8).numpy().tobytes()
    return torch.Tensor, tensor.dtype, tuple(tensor.shape), tensor.requires_grad, content
