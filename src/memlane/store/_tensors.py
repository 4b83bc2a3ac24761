"""torch CPU tensors as arrays of a numpy dtype. Imported only where torch is in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from memlane._base.tensors import CARRIERS, DTYPES, NAMES, address_of, is_in_memory, memory_of
from memlane.errors import CorruptMessage
from memlane.store import _wire

if TYPE_CHECKING:
    from memlane._native import ObjectMemory


class Pieces(Protocol):
    """The encoding's methods that a tensor in it uses."""

    def add(self, piece: memoryview, nbytes: int) -> None: ...
    def unsupported(self, value: object, why: str) -> list[Any]: ...


_IN_BOTH = {"bool", "int8", "float16", "float32", "float64", "complex64"}
_IN_BOTH |= {str(carrier).removeprefix("torch.") for carrier in CARRIERS.values()}


def _read_as(name: str, dtype: torch.dtype) -> tuple[np.dtype[Any], int, torch.dtype | None]:
    is_in_both = name in _IN_BOTH
    carrier = dtype if is_in_both else CARRIERS[dtype.itemsize]
    array: np.ndarray[Any, np.dtype[Any]] = torch.empty(0, dtype=carrier).numpy()
    return array.dtype, array.itemsize, None if is_in_both else dtype


# Name -> (numpy's dtype to read it as, item size, torch's dtype to view it as or None).
_READ_AS = {name: _read_as(name, dtype) for name, dtype in DTYPES.items()}


def encode(encoding: Pieces, tensor: torch.Tensor) -> list[Any]:
    if not is_in_memory(tensor):
        return encoding.unsupported(tensor, f"it is not a plain CPU tensor, but {_kind(tensor)}")
    if tensor.__dict__:
        why = f"its attributes ({', '.join(tensor.__dict__)}) would be lost; store its .detach()"
        return encoding.unsupported(tensor, why)
    node = [_wire.TENSOR, NAMES[tensor.dtype], tensor.shape]
    if tensor.is_conj() or tensor.is_neg():
        address_of("the tensor", tensor)
        tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel():
        memory, strides = memory_of(tensor)
        encoding.add(memory, memory.nbytes)
        if strides is not None:
            node.append(strides)
    return node


def _parameter(encoding: Pieces, parameter: torch.nn.Parameter) -> list[Any]:
    return encoding.unsupported(parameter, "it would arrive as a tensor; store its .detach()")


def _kind(tensor: torch.Tensor) -> str:
    special = "a nested" if tensor.is_nested else f"a {tensor.layout}"
    return f"{special} one of {tensor.dtype} on {tensor.device}"


def decode(memory: ObjectMemory, node: list[Any]) -> torch.Tensor:
    _, name, shape, *strides = node
    found = _READ_AS.get(name)
    if found is None:
        raise CorruptMessage(f"torch has no dtype {name!r} here")
    in_numpy, itemsize, dtype = found
    try:
        piece: Any = memory.take_array(itemsize, shape, True)
        tensor = torch.from_numpy(np.ndarray(shape, in_numpy, piece))
        if strides:
            tensor.as_strided_(shape, *strides)  # refuses what lies beyond the memory
        return tensor if dtype is None else tensor.view(dtype)
    except RuntimeError as error:
        raise CorruptMessage(f"no tensor of {name} has the shape {shape}: {error}") from error


ENCODERS = {torch.Tensor: encode, torch.nn.Parameter: _parameter}
