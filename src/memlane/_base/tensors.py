"""The memory of torch tensors, and how plain ones are sent beside the pickle stream. Imported only
after torch itself."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import torch

from memlane._native import bytes_at, copy_parts, pooled
from memlane.errors import InvalidArgument, InvalidType

# The dtypes whose tensors are their bytes, if this torch has them. Others, such as the quantized
# ones, are more than that, or not known to be: torch reads and writes beyond memory without it.
DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name in (
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("uint1", "uint2", "uint3", "uint4", "uint5", "uint6", "uint7"),
        *("int1", "int2", "int3", "int4", "int5", "int6", "int7"),
        *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
        *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
        "float4_e2m1fn_x2",
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# A dtype of each size, to stand in for those that numpy lacks or torch cannot copy.
CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}

Strides = tuple[int, ...]


def address_of(name: str, tensor: torch.Tensor) -> int:
    """The address of a strided tensor's first element; raises if its memory is not all there."""
    try:
        address: int = tensor.data_ptr()
        there: int = tensor.untyped_storage().nbytes()
    except RuntimeError as error:
        raise InvalidType(f"{name} has no memory: {error}") from error
    if tensor.numel():
        first, itemsize = tensor.storage_offset(), tensor.element_size()
        last = sum((n - 1) * by for n, by in zip(tensor.shape, tensor.stride(), strict=True))
        need = (first + last + 1) * itemsize
        if address == first * itemsize or there < need:  # the storage itself is at 0
            raise InvalidArgument(
                f"{name} has no memory: its storage was freed, shrunk or never allocated (it has "
                f"{there} bytes, the tensor needs {need})"
            )
    return address


def memory_of(tensor: torch.Tensor) -> tuple[memoryview, Strides | None]:
    """The bytes of a plain CPU tensor, and its strides unless they are those of C order.

    A tensor whose elements are not dense in memory is copied in C order.
    """
    address = address_of("the tensor", tensor)
    strides = None
    if not tensor.is_contiguous() or 1 in tensor.shape:
        strides = tensor.stride()
        if not _is_dense(tensor.shape, strides):
            tensor = tensor.detach().view(CARRIERS[tensor.element_size()]).contiguous()
            address = tensor.data_ptr()
            strides = None
        elif strides == _c_order(tensor.shape):
            strides = None
    return bytes_at(tensor, address, tensor.nbytes), strides


def _c_order(shape: Strides) -> Strides:
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _is_dense(shape: Strides, strides: Strides) -> bool:
    """Returns whether the elements are in memory without gaps, in the order of some permutation."""
    step = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


def is_in_memory(tensor: torch.Tensor) -> bool:
    """Returns whether it is a strided CPU tensor of a dtype whose tensors are their bytes."""
    return (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.dtype in NAMES
        and not tensor.is_nested
    )


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if is_in_memory(tensor):
        reduced = _reduce_lazy(tensor) if _is_lazy(tensor) else _reduce_memory(tensor)
    elif tensor.is_cpu and tensor.layout in _SPARSE_PARTS:
        reduced = _reduce_sparse(tensor)
    else:
        return tuple(tensor.__reduce_ex__(5))
    # As state, which is pickled after the tensor, because attributes may refer to it.
    return (*reduced, tensor.__dict__, None, None, _update) if tensor.__dict__ else reduced


def _update(tensor: torch.Tensor, attributes: dict[str, Any]) -> None:
    tensor.__dict__.update(attributes)


def reduce_subclass(tensor: torch.Tensor) -> Any:
    """Reduces a tensor of a subclass as torch does, but with its own elements instead of its whole
    storage. `NotImplemented` and other reductions are the class's own.
    """
    if type(tensor) in copyreg.dispatch_table:
        return NotImplemented
    reduced: tuple[Any, ...] = tensor.__reduce_ex__(5)
    if reduced[0] is _FROM_TYPE and reduced[1][0] in _FROM_STORAGE:
        rebuild, kind, arguments, state = reduced[1]
        plain = rebuild(*arguments)
        if type(plain) is torch.Tensor:
            return _FROM_TYPE, (_itself, kind, (plain,), state)
    return reduced


# What torch's own reductions of subclasses call, under its private names. A torch that lacks them
# sends the whole storage.
_FROM_TYPE = getattr(torch._tensor, "_rebuild_from_type_v2", None)
_FROM_STORAGE = tuple(
    getattr(torch._utils, name)
    for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3")
    if hasattr(torch._utils, name)
)


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _is_lazy(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_conj() or tensor.is_neg())


def _reduce_lazy(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Sends what is in memory, and which operations are still to be done on it."""
    is_conj, is_neg = tensor.is_conj(), tensor.is_neg()
    stored = _with_lazy(tensor.detach(), is_conj, is_neg)  # doing them again undoes them
    return _rebuild_lazy, (stored, is_conj, is_neg, tensor.requires_grad)


def _with_lazy(tensor: torch.Tensor, is_conj: bool, is_neg: bool) -> torch.Tensor:
    tensor = tensor.conj() if is_conj else tensor
    return torch._neg_view(tensor) if is_neg else tensor


def _rebuild_lazy(
    stored: torch.Tensor, is_conj: bool, is_neg: bool, requires_grad: bool
) -> torch.Tensor:
    tensor = _with_lazy(stored, is_conj, is_neg)
    return tensor.requires_grad_() if requires_grad else tensor


def _reduce_memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    shape = tuple(tensor.shape)
    if tensor.numel() == 0:
        return _rebuild_empty, (tensor.dtype, shape, tensor.requires_grad)
    memory, strides = memory_of(tensor)
    parts = (PickleBuffer(memory), tensor.dtype, shape, tensor.requires_grad)
    return _rebuild_tensor, parts if strides is None else (*parts, strides)


def _rebuild_empty(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def _rebuild_tensor(
    buffer: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    strides: Strides | None = None,
) -> torch.Tensor:
    memory = buffer
    if isinstance(buffer, memoryview) and buffer.readonly:
        # Shared memory: torch has no read-only tensors, and no write may reach another process. Up
        # to 16 MiB a copy costs less than a private mapping (docs/design/message.md).
        memory = pooled(buffer.nbytes)
        copy_parts(memory, 0, [buffer], buffer.nbytes)
    # In place: reshape() would return a view, which keeps a second tensor on the same storage.
    tensor = torch.frombuffer(memory, dtype=dtype)
    tensor = tensor.resize_(shape) if strides is None else tensor.as_strided_(shape, strides)
    if tensor.data_ptr() % tensor.element_size():
        tensor = tensor.clone()  # the chunk's size is odd, and torch's kernels rely on alignment
    return tensor.requires_grad_() if requires_grad else tensor


_SPARSE_PARTS: dict[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values", "is_coalesced"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


# torch's own reducer keeps every unpickled sparse tensor alive until the next torch.load.
def _reduce_sparse(tensor: torch.Tensor) -> tuple[Any, ...]:
    parts = [getattr(tensor.detach(), name)() for name in _SPARSE_PARTS[tensor.layout]]
    return _rebuild_sparse, (tensor.layout, parts, tuple(tensor.shape), tensor.requires_grad)


def _rebuild_sparse(
    layout: torch.layout, parts: list[Any], shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    first, second, third = parts
    if layout == torch.sparse_coo:
        tensor = torch.sparse_coo_tensor(
            first, second, shape, is_coalesced=third, check_invariants=False
        )
    else:
        tensor = torch.sparse_compressed_tensor(
            first, second, third, shape, layout=layout, check_invariants=False
        )
    return tensor.requires_grad_() if requires_grad else tensor


REDUCERS: dict[type, Callable[[Any], Any]] = {torch.Tensor: _reduce_tensor}
