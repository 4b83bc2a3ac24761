"""torch CPU tensors beside the pickle stream. Imported only once the caller has imported torch."""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import torch

Reducer = Callable[[Any], "tuple[Any, ...]"]


class _Reducers(dict[type, Reducer]):
    """Ours first, then what others have registered with copyreg, also later on."""

    def __missing__(self, kind: type) -> Reducer:
        reducer: Reducer = copyreg.dispatch_table[kind]  # type: ignore[assignment]
        return reducer


def tensor_reducers() -> dict[type, Reducer]:
    """The dispatch table of a Pickler that sends plain CPU tensors by one copy."""
    return _Reducers({torch.Tensor: _reduce_tensor})


def _reduce_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    plain = (
        tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
    if not plain:
        return tuple(tensor.__reduce_ex__(5))
    if tensor.numel() == 0:
        return _rebuild_empty, (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
    # As bytes: numpy has no bfloat16 and no float8. A tensor with gaps is gathered first.
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
    is_view = isinstance(buffer, memoryview) and buffer.readonly
    memory = buffer.obj.writable() if is_view else buffer  # torch knows no read-only memory
    tensor = torch.frombuffer(memory, dtype=dtype).reshape(shape)
    return tensor.requires_grad_() if requires_grad else tensor


def _storage_uses(tensor: torch.Tensor) -> int:
    # A count that torch does not document; without it no sharing is found.
    count = getattr(torch._C, "_storage_Use_Count", None)
    return 0 if count is None else int(count(tensor.untyped_storage()._cdata))


_UNSHARED = _storage_uses(_rebuild_tensor(bytearray(1), torch.uint8, (1,), False))


def is_storage_shared(tensor: torch.Tensor) -> bool:
    """Is there another tensor or array on the memory of one that came in a message?"""
    return _storage_uses(tensor) > _UNSHARED
