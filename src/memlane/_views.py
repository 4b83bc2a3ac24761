"""What still refers to shared memory when the block of a zero-copy read ends.

The memory itself is safe whatever is said here: it is given back only when its last export goes,
which is counted natively. Here is found out whether the end of the block is an error, and whose.

`with ... as name` leaves `name` behind, so that one reference is nobody's fault. It is told from
all others by counting: every array that the block yielded must have as many references as the
block's value itself holds on it, and no more.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

import numpy as np


def survivor(value: Any) -> str | None:
    """The type of something in `value` that anything but the name of `with ... as name` refers to.

    The caller has one reference to `value`. Looks into lists, tuples, dicts, arrays and tensors,
    some 50 ns for each element; what hides in other objects is not found, and keeps its memory
    without an error.
    """
    torch = sys.modules.get("torch")
    tensor: Any = getattr(torch, "Tensor", ())
    kinds = (np.ndarray, memoryview, list, tuple, dict) + ((tensor,) if tensor else ())

    parts: list[Any] = []  # every object of `value` that may refer to its memory, once
    held: list[int] = []  # how many references to it `value` itself has
    index: dict[int, int] = {}
    names = 2 if sys.getrefcount(value) > 3 else 1  # the caller's, and that of `with ... as name`
    unpacked = names == 1 and isinstance(value, (list, tuple))  # ... as (one, other)
    pending = [value]
    del value
    while pending:
        part = pending.pop()
        if id(part) in index:
            held[index[id(part)]] += 1
            continue
        index[id(part)] = len(parts)
        parts.append(part)
        held.append(1)
        pending += _referred_to(part, kinds)
    part = None
    held[0] = names
    if unpacked:
        for one in parts[0]:
            if id(one) in index:
                held[index[id(one)]] += 1
        one = None

    for at in range(len(parts)):
        # besides: the list's reference, and getrefcount's own
        if sys.getrefcount(parts[at]) > held[at] + 2:
            return type(parts[at]).__name__
        if tensor and isinstance(parts[at], tensor) and _is_storage_shared(parts[at]):
            return "storage of a tensor"
    return None


def _referred_to(part: Any, kinds: tuple[type, ...]) -> list[Any]:
    if isinstance(part, np.ndarray):
        # Slices refer to the array that the memory came with, not to the one they were taken of.
        return [] if part.base is None else [part.base]
    if isinstance(part, memoryview):
        return gc.get_referents(part)  # what it shares with its slices
    if isinstance(part, dict):
        return [one for one in part.values() if isinstance(one, kinds)]
    if isinstance(part, (list, tuple)):
        return [one for one in part if isinstance(one, kinds)]
    return []


def _is_storage_shared(tensor: Any) -> bool:
    from memlane._torch import is_storage_shared

    return is_storage_shared(tensor)
