"""The page size of a region: what is asked for, and what was obtained."""

from __future__ import annotations

from contextlib import suppress
from typing import Literal, get_args

from memlane.errors import InvalidArgument

Pages = Literal["auto", "4k", "huge"]
Rung = Literal["4k", "huge", "mixed"]

_HUGE_PAGE = 2 << 20


def checked_pages(pages: object) -> Pages:
    """Returns `pages`, or raises InvalidArgument."""
    for known in get_args(Pages):
        if pages == known:
            return known  # type: ignore[no-any-return]
    raise InvalidArgument(f"pages must be one of {get_args(Pages)}, not {pages!r}")


def rung_of(address: int, populated: int) -> Rung:
    """The page size of the mapping at `address`, of which `populated` bytes are populated."""
    huge = _bytes_in_huge_pages(address)
    if huge == 0:
        return "4k"
    # The last huge page may be cut off by the end of the file.
    return "huge" if huge + _HUGE_PAGE > populated else "mixed"


def _bytes_in_huge_pages(address: int) -> int:
    """Reads as far as that mapping: for what comes after it, the kernel would count all pages."""
    is_it = False
    with suppress(OSError), open("/proc/self/smaps", errors="replace") as lines:
        for line in lines:
            first = line.split(None, 1)[0]
            if not first.endswith(":"):
                is_it = int(first.split("-")[0], 16) == address
            elif is_it and first == "ShmemPmdMapped:":
                return int(line.split()[1]) * 1024
    return 0  # or nobody can tell, without /proc
