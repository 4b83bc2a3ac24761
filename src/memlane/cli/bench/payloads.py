"""What is sent: from a scheduler's decision to 64 MiB arrays and tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Payload:
    """A kind of message with `bytes` of content; `is_array`: pickle passes it out of band."""

    name: str
    title: str
    bytes: int
    make: Callable[[], object]
    is_array: bool = False
    is_tensor: bool = False


def _step() -> object:
    """A scheduler's decision for one step; 225 bytes pickled."""
    return {
        "step": 104_217,
        "kind": "decode",
        "requests": [f"req-{number}" for number in range(4100, 4108)],
        "lengths": [812, 77, 1503, 34, 260, 1999, 8, 640],
        "blocks": [3301, 3302, 871, 15, 2209, 908, 41, 77],
        "done": [],
    }


def _array(count: int) -> object:
    return np.arange(count // 8, dtype=np.float64)


def _bytes(count: int) -> object:
    return np.arange(count // 8, dtype=np.uint64).tobytes()


def _tensor(count: int) -> object:
    import torch

    torch.set_num_threads(1)  # the process forks later, and must not have other threads then
    return torch.arange(count // 4, dtype=torch.float32)


PAYLOADS = (
    Payload("dict", "scheduler step, 225 B", 225, _step),
    Payload("bytes-4k", "4 KiB bytes", 4 * KIB, lambda: _bytes(4 * KIB)),
    Payload("bytes-64k", "64 KiB bytes", 64 * KIB, lambda: _bytes(64 * KIB)),
    Payload("bytes-1m", "1 MiB bytes", MIB, lambda: _bytes(MIB)),
    Payload("array-1m", "1 MiB array", MIB, lambda: _array(MIB), is_array=True),
    Payload("array-64m", "64 MiB array", 64 * MIB, lambda: _array(64 * MIB), is_array=True),
    Payload("tensor-16m", "16 MiB tensor", 16 * MIB, lambda: _tensor(16 * MIB), is_tensor=True),
    Payload("tensor-64m", "64 MiB tensor", 64 * MIB, lambda: _tensor(64 * MIB), is_tensor=True),
)
BY_NAME = {payload.name: payload for payload in PAYLOADS}


def same(left: object, right: object) -> bool:
    """Whether a message arrived as it was sent."""
    if isinstance(left, np.ndarray) and isinstance(right, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if hasattr(left, "untyped_storage") and hasattr(right, "untyped_storage"):
        import torch

        return bool(torch.equal(left, right))
    return type(left) is type(right) and left == right
