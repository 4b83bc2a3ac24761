"""Names that users give to segments: which are valid, and their bytes in the header.

It is shown wherever the segment is, so it is kept to what needs no escaping in a terminal, in
Prometheus and in a file's name.
"""

from __future__ import annotations

import string

from memlane.errors import InvalidArgument, InvalidType

LONGEST = 40  # bytes in the header
_ALLOWED = frozenset(string.ascii_letters + string.digits + "._-[]/")


def checked_label(name: object, most: int = LONGEST) -> str:
    """Returns `name`, if a segment can have it; None is no name. `most` is its greatest length."""
    if name is None:
        return ""
    if not isinstance(name, str):
        raise InvalidType(f"name must be a string, not {type(name).__name__}")
    if not 0 < len(name) <= most or not _ALLOWED.issuperset(name):
        raise InvalidArgument(
            f"name must be 1 to {most} of the ASCII letters, digits and . _ - [ ] /, not {name!r}"
        )
    return name


def label_in(field: bytes) -> str:
    """The label in a header, which its peers may have written anything to: up to what none has."""
    text = field.decode("latin-1")
    return next((text[:at] for at, each in enumerate(text) if each not in _ALLOWED), text)
