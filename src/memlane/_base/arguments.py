"""Checks of callers' arguments; errors name the argument and its value."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import TypeVar

from memlane.errors import InvalidArgument, InvalidType

# File offsets are signed 64-bit numbers; a segment beyond a quarter of their range is a mistake.
MAX_SEGMENT_BYTES = 1 << 61

T = TypeVar("T")


def integer(name: str, value: object) -> int:
    """`value` as an int; accepts anything with `__index__` (numpy integers, say) except bools."""
    if isinstance(value, bool):
        raise InvalidType(f"{name} must be an integer, not {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidType(f"{name} must be an integer, not {type(value).__name__}") from None


def integer_from(name: str, value: object, least: int, most: int | None = None) -> int:
    """`value` as an int that is at least `least`, and at most `most`."""
    number = integer(name, value)
    if number < least:
        raise InvalidArgument(f"{name} must be at least {least}, not {number}")
    if most is not None and number > most:
        raise InvalidArgument(f"{name} must be at most {most}, not {number}")
    return number


def items_of(name: str, values: Iterable[T]) -> list[T]:
    """The items of `values`, as a new list."""
    try:
        each = iter(values)
    except TypeError:
        raise InvalidType(f"{name} must be a sequence, not {type(values).__name__}") from None
    return list(each)


def segment_name(name: object) -> str:
    """`name`, if it can be the name of a file directly in /dev/shm."""
    if not isinstance(name, str):
        raise InvalidType(f"a segment's name must be a string, not {type(name).__name__}")
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    encoded = name.encode(errors="replace")  # a name that is not UTF-8 cannot be encoded as it is
    if not plain or encoded.decode() != name or len(encoded) > 255:
        raise InvalidArgument(f"{name!r} cannot be the name of a segment")
    return name
