"""What still refers to shared memory when the block of a zero-copy read ends.

The memory itself is safe whatever is said here: it is given back only when its last export goes,
which is counted natively. Here is found out whether the end of the block is an error, and whose.

`with ... as name` leaves `name` behind, so that one reference is nobody's fault. It is told from
all others by counting: every object of the block's value that leads to the memory must have as
many references as the value itself holds on it, and no more.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from memlane._native import ForeignMemory, SharedBuffer

if TYPE_CHECKING:
    from memlane._native import ViewLease

# Of exactly these types: lead nowhere, and are most of what a message holds.
_LEAVES = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray})
_CONTAINERS = (list, tuple, set, frozenset, deque)
_OF_PYTHON_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE
_LENT = (SharedBuffer, ForeignMemory)  # whose memory a view is of
_ManagedBuffer = type(gc.get_referents(memoryview(b""))[0])  # what a memoryview shares with slices


def survivor(box: list[Any], lease: ViewLease) -> str | None:
    """The type of something that leads to the memory of `lease`, and that anything but the name of
    `with ... as name` and the block's value, the only element of `box`, refers to.

    Looks into containers and the attributes of objects, some 50 ns for each. The caller has no
    other reference to the value.
    """
    is_named = sys.getrefcount(box[0]) > 2  # besides: the box's reference, and getrefcount's own
    parts: list[Any] = []  # every object of the value that may lead to memory, once
    held: list[int] = []  # how many references to it are known
    parents: list[list[int]] = []
    index: dict[int, int] = {}
    pending = [(box[0], -1)]
    while pending:
        part, parent = pending.pop()
        at = index.setdefault(id(part), len(parts))
        if at == len(parts):
            parts.append(part)
            held.append(0)
            parents.append([])
            pending += [(one, at) for one in _referred_to(part)]
        held[at] += 1
        if parent >= 0:
            parents[at].append(parent)
    part = None
    if is_named:
        held[0] += 1
    elif isinstance(parts[0], (list, tuple)):  # ... as (one, other)
        for at in {index[id(one)] for one in parts[0] if id(one) in index}:
            held[at] += 1

    leading = {at for at in range(len(parts)) if _is_alias(parts[at], lease)}
    unseen = list(leading)
    while unseen:
        new = set(parents[unseen.pop()]) - leading
        leading |= new
        unseen += new
    for at in sorted(leading):
        # besides: the list's reference, and getrefcount's own
        if sys.getrefcount(parts[at]) > held[at] + 2:
            return type(parts[at]).__name__
        if _is_storage_shared(parts[at]):
            return "storage of a tensor"
    return None


def _referred_to(part: Any) -> list[Any]:
    found: Iterable[Any]
    if isinstance(part, np.ndarray):
        # Slices refer to the array that the memory came with, not to the one they were taken of.
        found = [part.base, *part.flat] if part.dtype.hasobject else [part.base]
    elif isinstance(part, dict):
        found = part.values()
    elif isinstance(part, _CONTAINERS):
        found = part
    elif isinstance(part, memoryview) or (
        type(part).__flags__ & _OF_PYTHON_CLASS and not _is_tensor(part)
    ):
        found = gc.get_referents(part)
    else:
        return []
    return [one for one in found if type(one) not in _LEAVES and not isinstance(one, type)]


def _is_alias(part: Any, lease: ViewLease) -> bool:
    if isinstance(part, np.ndarray):
        return lease.covers(part.__array_interface__["data"][0])
    if isinstance(part, memoryview):
        return isinstance(part.obj, _LENT)
    if isinstance(part, _ManagedBuffer):
        return any(isinstance(one, _LENT) for one in gc.get_referents(part))
    if _is_tensor(part):
        from memlane._torch import address_of

        return lease.covers(address_of(part))
    return False


def _is_tensor(part: Any) -> bool:
    torch = sys.modules.get("torch")
    return isinstance(part, getattr(torch, "Tensor", ()))


def _is_storage_shared(part: Any) -> bool:
    if not _is_tensor(part):
        return False
    from memlane._torch import is_storage_shared

    return is_storage_shared(part)
