"""Sends torch CPU tensors beside the pickle stream. Imported only after torch itself."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import torch

from memlane._native import copy_parts, pooled

Reducer = Callable[[Any], "tuple[Any, ...]"]


class _Reducers(dict[type, Reducer]):
    """memlane's reducers first, then those registered with copyreg, now or later."""

    def __missing__(self, kind: type) -> Reducer:
        reducer: Reducer = copyreg.dispatch_table[kind]  # type: ignore[assignment]
        return reducer


def tensor_reducers() -> dict[type, Reducer]:
    """A dispatch table for a Pickler that sends plain CPU tensors with a single copy."""
    return _Reducers({torch.Tensor: _reduce_tensor})


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the values in its memory are all there is to the tensor."""
    return (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.__dict__:  # attributes that the caller has set
        return tuple(tensor.__reduce_ex__(5))
    if not _is_plain(tensor):
        if tensor.device.type == "cpu" and tensor.layout in _SPARSE_PARTS:
            return _reduce_sparse(tensor)
        return tuple(tensor.__reduce_ex__(5))
    if tensor.numel() == 0:
        return _rebuild_empty, (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
    # As bytes: numpy has no bfloat16 or float8. A tensor with gaps is made contiguous first.
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return (
        _rebuild_tensor,
        (PickleBuffer(flat.numpy()), tensor.dtype, tuple(tensor.shape), tensor.requires_grad),
    )


def _rebuild_empty(dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=requires_grad)


def _rebuild_tensor(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    memory = buffer
    if isinstance(buffer, memoryview) and buffer.readonly:
        # Shared memory: torch has no read-only tensors, and no write may reach another process. Up
        # to 16 MiB a copy costs less than a private mapping (ARCHITECTURE.md).
        memory = pooled(buffer.nbytes)
        copy_parts(memory, 0, [buffer], buffer.nbytes)
    # In place: reshape() would return a view, which keeps a second tensor on the same storage.
    tensor = torch.frombuffer(memory, dtype=dtype).resize_(shape)
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
