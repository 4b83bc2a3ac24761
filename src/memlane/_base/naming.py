"""Lists processes and names files in texts. Pure: protocols and reports share it."""

from __future__ import annotations

from memlane.errors import InvalidArgument

MOST_NAMED = 8
"""A text names this many processes, and counts the rest."""


def shown(path: str) -> str:
    """A path for texts: bytes that are not UTF-8, which nobody could print, become escapes."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")


def names_of(waiting_for: list[str]) -> str:
    """Joins the first names and counts the rest; the list is empty if all have just arrived."""
    if not waiting_for:
        return "peers that have responded since"
    more = len(waiting_for) - MOST_NAMED
    return ", ".join(waiting_for[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def not_readmitted(rank: int, state: str) -> InvalidArgument:
    """The error for a place that nobody else may take."""
    return InvalidArgument(
        f"reader {rank} is {state}: only the place of one that has closed, or was released by "
        f"release_reader({rank}), can be taken by another"
    )
