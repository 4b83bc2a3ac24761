"""Arrays as blocks: their kind, their memory, and whether two arrays match."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import numpy as np

from memlane._importing import fork_waits
from memlane._native import BlockArray
from memlane.errors import InvalidArgument, InvalidType

# Ids are kept in 32 bits (native/offload/copy_layout.hpp).
MOST_BLOCKS = 1 << 32

# Plain bytes, which match blocks of any dtype and the same size.
_BYTES = frozenset(("int8", "uint8"))


class Side:
    """`src` or `dst` of a move; keeps its memory alive."""

    __slots__ = ("blocks", "device", "dtype", "is_writable", "keeper", "name", "shape")

    def __init__(self, name: str, array: Any) -> None:
        self.name = name
        self.keeper = array
        self.device: Any = None  # torch's device; None for host memory
        torch = sys.modules.get("torch")
        if isinstance(array, np.ndarray):
            self._take_array(array)
        elif torch is not None and isinstance(array, torch.Tensor):
            self._take_tensor(torch, array)
        else:
            self._take_array(_shown(name, array))

    def _take_array(self, array: np.ndarray[Any, Any]) -> None:
        kind = array.dtype
        if kind.hasobject:
            raise InvalidType(f"{self.name} holds Python objects, which cannot be copied as bytes")
        self._take_shape(array.shape)
        self.dtype = kind
        self.is_writable = array.flags.writeable
        self.blocks = BlockArray.of_buffer(array)

    def _take_tensor(self, torch: Any, tensor: Any) -> None:
        if (
            tensor.layout is not torch.strided
            or tensor.device.type not in ("cpu", "cuda")
            or tensor.is_quantized
            or tensor.is_nested
            or tensor.is_conj()
            or tensor.is_neg()
        ):
            raise InvalidType(
                f"{self.name} must be a plain tensor in memory, not a "
                f"{'lazily computed ' if tensor.is_conj() or tensor.is_neg() else ''}"
                f"{tensor.layout} one on {tensor.device}"
            )
        self._take_shape(tuple(tensor.shape))
        self.dtype = tensor.dtype
        self.is_writable = True
        if tensor.device.type == "cuda":
            self.device = tensor.device
        itemsize = tensor.element_size()
        strides = [stride * itemsize for stride in tensor.stride()]
        with fork_waits:
            from memlane._base.tensors import address_of

        self.blocks = BlockArray.at(address_of(self.name, tensor), self.shape, strides, itemsize)

    def _take_shape(self, shape: tuple[int, ...]) -> None:
        if not shape:
            raise InvalidArgument(f"{self.name} has no axis; the first one counts the blocks")
        if shape[0] > MOST_BLOCKS:
            raise InvalidArgument(f"{self.name} has {shape[0]} blocks, more than {MOST_BLOCKS}")
        self.shape = shape

    def require_writable(self) -> None:
        if not self.is_writable:
            raise InvalidArgument(f"{self.name} is read-only; nothing was moved")

    def require_fits(self, other: Side) -> None:
        """Raises unless blocks have the same size, and the same dtype or one dtype is bytes."""
        mine, theirs = self.blocks.block_bytes, other.blocks.block_bytes
        if mine != theirs:
            raise InvalidArgument(
                f"a block of {self.name} has {mine} bytes (shape {self.shape}, "
                f"{_name_of(self.dtype)}), one of {other.name} {theirs} (shape {other.shape}, "
                f"{_name_of(other.dtype)}); nothing was moved"
            )
        if self.dtype is other.dtype:
            return
        names = {_name_of(self.dtype), _name_of(other.dtype)}
        if len(names) > 1 and not names & _BYTES:
            raise InvalidArgument(
                f"{self.name} is {_name_of(self.dtype)} and {other.name} {_name_of(other.dtype)}; "
                "copies do not convert. View one of them as int8 to move its bytes as they are"
            )


@cache
def _name_of(dtype: Any) -> str:
    """The same name for the same numbers in numpy and torch; byte order and fields matter too."""
    if not isinstance(dtype, np.dtype):
        return str(dtype).removeprefix("torch.")
    return dtype.name if dtype.isnative and dtype.kind != "V" else str(dtype)


def _shown(name: str, array: Any) -> np.ndarray[Any, Any]:
    """The memory of an object with the buffer protocol."""
    try:
        return np.asarray(memoryview(array))
    except TypeError:
        raise InvalidType(
            f"{name} must be an array, a tensor or an object with the buffer protocol, not "
            f"{type(array).__name__}"
        ) from None
    except (ValueError, BufferError) as error:
        raise InvalidArgument(f"the memory of {name} cannot be used: {error}") from error
