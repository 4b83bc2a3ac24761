"""The page size of a region: what is asked for, and what was obtained."""

from __future__ import annotations

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


def rung_of(huge_pages: int, total_bytes: int) -> Rung:
    """Returns what a region of that size has, with so many huge pages: the last one may be cut off
    by its end."""
    if huge_pages == 0:
        return "4k"
    return "huge" if huge_pages >= total_bytes // _HUGE_PAGE else "mixed"
