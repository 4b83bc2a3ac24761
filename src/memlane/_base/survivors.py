"""Finds references to shared memory that outlive the block of a zero-copy read.

The memory is safe whatever is found here: it is freed with its last reference. This module only
decides whether the end of the block is an error, and what that error names.

`with ... as name` leaves `name` bound, so one reference to the value is allowed. Counting tells it
from others: each object in the block's value that leads to the memory must have exactly as many
references as the value itself holds to it. What an object refers to is found through its type, as
the garbage collector does.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from memlane._native import Buffer

if TYPE_CHECKING:
    from memlane._native import ViewLease

# Objects of exactly these types refer to nothing; they are most of what a message contains.
_LEAVES = frozenset((str, int, float, type(None), bool, bytes, bytearray, complex))
_CONTAINERS = (dict, list, tuple, set, frozenset, memoryview, deque)
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made in Python

# What a memoryview shares with its slices.
_ManagedBuffer = type(gc.get_referents(memoryview(b""))[0])


def _uses(parts: list[Any]) -> list[int]:
    """References to each part, including those of this call and of the list."""
    return list(map(sys.getrefcount, parts))


def _uses_of_a_local() -> int:
    part = object()
    return sys.getrefcount(part)


# Functions that drop such references; systems that keep some add theirs.
DROPPERS: list[Callable[[], None]] = []

_LISTED = _uses([object()])[0]
_LOCAL = _uses_of_a_local()


def drop_finished() -> None:
    """Drops the references that are kept for asynchronous work which has ended."""
    for drop in DROPPERS:
        drop()


def survivor(box: list[Any], lease: ViewLease) -> str | None:
    """The type of an object that leads to the lease's memory and outlives the block, or None.

    Args:
        box: its only element is the block's value, to which the caller has no other reference.
        lease: the lease of the memory.
    """
    others = _uses(box)[0] - _LISTED
    if others <= 1 and _is_array_alone(box[0]):
        return None
    parts, held = _survey(box[0])
    held[id(box[0])] += 1 + (others > 0)  # the box, and the name
    if not others and isinstance(box[0], (tuple, list)):  # with ... as (one, other)
        for member in held.keys() & {id(one) for one in _held_by(box[0])}:
            held[member] += 1
    counts = zip(parts, _uses(parts), held.values(), strict=True)
    used = [part for part, uses, known in counts if uses - _LISTED > known]
    if used:
        leading = _leading(parts, lease)
        for part in used:
            if id(part) in leading:
                return type(part).__name__
    return None


def _is_array_alone(part: Any) -> bool:
    """Returns whether it is an array on memory without other references, which needs no further
    search."""
    if type(part) is not np.ndarray:
        return False
    while type(part) is np.ndarray:
        if part.dtype.hasobject:
            return False
        part = part.base
        if sys.getrefcount(part) - _LOCAL > 1:
            return False
    if isinstance(part, Buffer):  # an object of the store
        return True
    if type(part) is not memoryview:
        return False
    part = gc.get_referents(part)[0]
    return sys.getrefcount(part) - _LOCAL == 1


def _survey(value: Any) -> tuple[list[Any], dict[int, int]]:
    """All objects reachable from the value; by id, how many references each has from the others."""
    parts, held = [value], {id(value): 0}
    for part in parts:  # grows in the loop
        if _is_array_alone(part):
            continue
        for one in _held_by(part):
            if type(one) in _LEAVES:
                continue
            if id(one) in held:
                held[id(one)] += 1
            elif not issubclass(type(one), type):
                held[id(one)] = 1
                parts.append(one)
    return parts, held


def _held_by(part: Any) -> Iterable[Any]:
    kind = type(part)
    if kind in _CONTAINERS:
        return gc.get_referents(part)
    if issubclass(kind, np.ndarray):
        # Slices refer to the array that owns the memory, not to the one they were taken from.
        return (part.base, *part.flat) if part.dtype.hasobject else (part.base,)
    if issubclass(kind, _CONTAINERS):
        return gc.get_referents(part)
    if kind.__flags__ & _HEAP_TYPE and not _is_tensor(part):
        return gc.get_referents(part)
    return ()


def _leading(parts: list[Any], lease: ViewLease) -> set[int]:
    """Ids of the parts that lead to the lease's memory."""
    leading = {id(part) for part in parts if _is_alias(part, lease)}
    # Containers mostly precede what they contain, so the second round rarely finds anything.
    before = -1
    while len(leading) > before:
        before = len(leading)
        for part in reversed(parts):
            if not leading.isdisjoint(map(id, _held_by(part))):
                leading.add(id(part))
    return leading


def _is_alias(part: Any, lease: ViewLease) -> bool:
    kind = type(part)
    if issubclass(kind, np.ndarray):
        return lease.covers(part.__array_interface__["data"][0])
    if kind is memoryview:
        return any(_is_alias(one, lease) for one in gc.get_referents(part))
    if kind is _ManagedBuffer:
        return any(isinstance(one, Buffer) for one in gc.get_referents(part))
    return _is_tensor(part) and lease.covers(_address_of(part))


def _is_tensor(part: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and issubclass(type(part), getattr(torch, "Tensor", ()))


def _address_of(tensor: Any) -> int:
    """The tensor's address; 0 if it has no memory of its own (sparse, nested)."""
    try:
        return 0 if tensor.is_nested else int(tensor.data_ptr())
    except RuntimeError:
        return 0
