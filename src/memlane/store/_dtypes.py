"""numpy's dtypes as nodes of a tree.

A node is text (`<f4`), or for a dtype with fields [names, dtypes, offsets, titles, itemsize, is
aligned], or for a field that is an array [dtype, shape].
"""

from __future__ import annotations

import functools
import re
from typing import Any

import numpy as np

from memlane.errors import CorruptMessage

# Numbers, times, and text and bytes of fixed length. Excludes objects, however they are spelled,
# and times with a unit of zero seconds, by which numpy would divide.
_TEXT = re.compile(
    r"[<>|](?:[biufcSUV][0-9]{1,10}|[qQ]|[mM]8(?:\[(?:[1-9][0-9]{0,8})?[A-Za-z]{1,2}\])?)"
)


# numpy has a single object for each numeric dtype in native byte order, and most arrays use these.
_NUMBERS: dict[int, tuple[np.dtype[Any], str]] = {}


def describe(dtype: np.dtype[Any]) -> str | list[Any] | None:
    """The node for `dtype`; None if it is not one of numpy's own, or has objects or metadata."""
    known = _NUMBERS.get(id(dtype))
    if known is not None:
        return known[1]
    if dtype.metadata is not None:
        return None
    if dtype.names is not None:
        return _describe_fields(dtype)
    if dtype.subdtype is not None:
        base = describe(dtype.subdtype[0])
        return None if base is None else [base, dtype.subdtype[1]]
    if dtype.kind not in "biufcmMSUV" or dtype.isbuiltin == 2:
        return None
    if dtype.char in "qQ":  # long long has the same values as long, but is a different type
        return dtype.str[0] + dtype.char
    return dtype.str


def _describe_fields(dtype: np.dtype[Any]) -> list[Any] | None:
    by_name: Any = dtype.fields or {}
    fields = [by_name[name] for name in dtype.names or ()]
    kinds = [describe(field[0]) for field in fields]
    titles = [field[2] if len(field) > 2 else None for field in fields]
    if dtype.type is not np.void or None in kinds:
        return None
    if not all(title is None or type(title) is str for title in titles):
        return None
    offsets = [field[1] for field in fields]
    return [dtype.names, kinds, offsets, titles, dtype.itemsize, dtype.isalignedstruct]


def dtype_of(tree: Any) -> np.dtype[Any]:
    """The dtype of a node; raises CorruptMessage if there is no such dtype."""
    return _of_text(tree) if type(tree) is str else _checked(tree)


def _checked(tree: Any) -> np.dtype[Any]:
    try:
        dtype = _dtype_of(tree)
    except (OverflowError, TypeError, ValueError) as error:
        raise CorruptMessage(f"an array's dtype is wrong: {error}") from error
    # Valid for a field only. An array would get another dtype, or elements of zero bytes, of which
    # a few bytes can claim any number.
    if dtype.subdtype is not None or not dtype.itemsize:
        raise CorruptMessage(f"an array cannot have the dtype {dtype}")
    return dtype


_of_text = functools.lru_cache(maxsize=256)(_checked)


def _dtype_of(tree: Any) -> np.dtype[Any]:
    if type(tree) is str:
        return _dtype_of_text(tree)
    if len(tree) == 2:
        base, shape = tree
        return np.dtype((_dtype_of(base), tuple(shape)))
    names, kinds, offsets, titles, itemsize, is_aligned = tree
    fields = {
        "names": names,
        "formats": [_dtype_of(kind) for kind in kinds],
        "offsets": offsets,
        "titles": titles,
        "itemsize": itemsize,
    }
    return np.dtype(fields, align=is_aligned is True)  # type: ignore[call-overload, no-any-return]


def _dtype_of_text(text: str) -> np.dtype[Any]:
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text!r} is not a dtype of numbers, times or bytes")
    return np.dtype(text)


for _character in "?bBhHiIlLqQefdgFDG":
    _dtype: np.dtype[Any] = np.dtype(_character)
    _NUMBERS[id(_dtype)] = (_dtype, str(describe(_dtype)))
