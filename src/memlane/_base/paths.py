"""Checks of paths that callers pass; errors name the argument and its value."""

from __future__ import annotations

import os
import sys

from memlane.errors import InvalidArgument, InvalidType


def path_from(name: str, path: object) -> str:
    """Returns `path` as text. Raises InvalidType, and InvalidArgument if no file can have it: for a
    zero byte, or characters that the encoding of this process's locale does not have."""
    if not isinstance(path, (str, bytes, os.PathLike)):
        raise InvalidType(f"{name} must be a path, not {type(path).__name__}")
    found, encoding, why = os.fsdecode(path), sys.getfilesystemencoding(), ""
    try:
        if b"\0" not in os.fsencode(found):
            return found
    except UnicodeEncodeError:
        if encoding != "utf-8":
            why = f": file names are {encoding} here; set PYTHONUTF8=1, or LANG=C.UTF-8"
    raise InvalidArgument(f"{name} cannot be the path {path!r}{why}")
