"""torch CPU tensors as arrays of a numpy dtype. Imported only where torch is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from memlane._native import bytes_at
from memlane.errors import CorruptMessage
from memlane.store import _wire

if TYPE_CHECKING:
    from memlane._native import ObjectMemory
    from memlane.store._encode import Encoding

# A dtype of each size, to stand in for those that numpy lacks (bfloat16, float8).
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

# Without quantized dtypes: such tensors are more than their numbers.
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and "qint" not in str(dtype) and "quint" not in str(dtype)
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_IN_BOTH = {"bool", "int8", "float16", "float32", "float64", "complex64"}
_IN_BOTH |= {str(carrier).removeprefix("torch.") for carrier in _CARRIERS.values()}


def _read_as(name: str, dtype: torch.dtype) -> tuple[np.dtype[Any], int, torch.dtype | None]:
    is_in_both = name in _IN_BOTH
    carrier = dtype if is_in_both else _CARRIERS[dtype.itemsize]
    array: np.ndarray[Any, np.dtype[Any]] = torch.empty(0, dtype=carrier).numpy()
    return array.dtype, array.itemsize, None if is_in_both else dtype


# Name -> (numpy's dtype to read it as, item size, torch's dtype to view it as or None).
_READ_AS = {name: _read_as(name, dtype) for name, dtype in _DTYPES.items()}


def encode(encoding: Encoding, tensor: torch.Tensor) -> list[Any]:
    if (
        not tensor.is_cpu
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
    ):
        return encoding.unsupported(tensor, f"it is not a plain CPU tensor, but {_kind(tensor)}")
    node = [_wire.TENSOR, _NAMES[tensor.dtype], tensor.shape]
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.is_contiguous():
        tensor = tensor.detach().view(_CARRIERS[tensor.itemsize]).contiguous()
    nbytes = tensor.nbytes
    if nbytes:
        encoding.add(bytes_at(tensor, tensor.data_ptr(), nbytes), nbytes)
    return node


def _kind(tensor: torch.Tensor) -> str:
    special = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else ""
    return f"{special or tensor.layout} on {tensor.device}"


def decode(memory: ObjectMemory, node: list[Any]) -> torch.Tensor:
    _, name, shape = node
    found = _READ_AS.get(name)
    if found is None:
        raise CorruptMessage(f"torch has no dtype {name!r} here")
    in_numpy, itemsize, dtype = found
    try:
        piece: Any = memory.take_array(itemsize, shape, True)
        tensor = torch.from_numpy(np.ndarray(shape, in_numpy, piece))
        return tensor if dtype is None else tensor.view(dtype)
    except RuntimeError as error:
        raise CorruptMessage(f"no tensor of {name} has the shape {shape}: {error}") from error


# A Parameter is decoded as a plain tensor, which does not require a gradient.
ENCODERS = {torch.Tensor: encode, torch.nn.Parameter: encode}
