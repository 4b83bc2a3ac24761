"""The stored payloads: arrays of two sizes, and a nested dict of tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

KIB = 1024
MIB = 1024 * KIB

# torch warns about read-only views, whichever peer made them.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Payload:
    """A kind of object with `bytes` of arrays.

    A peer's memory has room for `slots` of them; `burst` are put in a row and then read.
    """

    name: str
    title: str
    bytes: int
    make: Callable[[], Any]
    slots: int
    burst: int


def _array(count: int) -> Callable[[], Any]:
    return lambda: np.arange(count // 8, dtype=np.float64)


def _tensors() -> Any:
    import torch

    def tensor(first: int) -> Any:  # numpy: torch's threads do not survive forks
        return torch.from_numpy(np.arange(first, first + 200 * KIB // 4, dtype=np.float32))

    return {
        "pixel_values": tensor(0),
        "text": {"embeddings": tensor(1), "mask": tensor(2)},
        "audio": [tensor(3), tensor(4)],
        "request": "req-4107",
        "length": 1503,
    }


PAYLOADS = (
    Payload("array-1m", "1 MiB array", MIB, _array(MIB), slots=32, burst=12),
    Payload("array-8m", "8 MiB array", 8 * MIB, _array(8 * MIB), slots=8, burst=3),
    Payload("tensors", "dict of 5 x 200 KiB", 5 * 200 * KIB, _tensors, slots=32, burst=12),
)
BY_NAME = {payload.name: payload for payload in PAYLOADS}


def arrays(obj: Any) -> Iterator[Array]:
    """The memory of the object's arrays and tensors, always in the same order."""
    if isinstance(obj, np.ndarray):
        yield obj
    elif isinstance(obj, dict):
        for value in obj.values():
            yield from arrays(value)
    elif isinstance(obj, list):
        for value in obj:
            yield from arrays(value)
    elif hasattr(obj, "numpy"):
        yield obj.numpy()


def stamp(obj: Any, number: int) -> None:
    """Makes the object differ from the one that was stored before."""
    for array in arrays(obj):
        array[0] = array[-1] = number


def is_stamped(obj: Any, number: int) -> bool:
    """Checks only both ends of every array, so as not to disturb the caches."""
    return all(array[0] == array[-1] == number for array in arrays(obj))


def check(obj: Any, own: Any, number: int) -> None:
    """Raises unless every byte of the object is that of `own`, stamped with that number."""
    stamp(own, number)
    pairs = zip(arrays(obj), arrays(own), strict=True)
    if not all(one.dtype == other.dtype and np.array_equal(one, other) for one, other in pairs):
        raise AssertionError(f"object {number} arrived changed")


def to_arrays(obj: Any) -> Any:
    """Turns tensors into arrays on the same memory, for peers whose pickling would copy tensors."""
    if isinstance(obj, dict):
        return {key: to_arrays(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [to_arrays(value) for value in obj]
    return obj.numpy() if hasattr(obj, "numpy") else obj


def to_tensors(obj: Any) -> Any:
    """The reverse of `to_arrays`."""
    import torch

    if isinstance(obj, dict):
        return {key: to_tensors(value) for key, value in obj.items()}
    if isinstance(obj, list):
        return [to_tensors(value) for value in obj]
    return torch.from_numpy(obj) if isinstance(obj, np.ndarray) else obj
