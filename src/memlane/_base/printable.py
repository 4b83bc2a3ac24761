"""Text that others chose: names of files, titles of processes. All outputs show it in one way."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line, and without effect on a terminal: what does not print is escaped.

    >>> printable("images"), printable("a\\x1b[2J\\nb\\udcff")
    ('images', 'a\\\\x1b[2J\\\\nb\\\\xff')
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def _escaped(character: str) -> str:
    if "\udc80" <= character <= "\udcff":  # a byte that is no UTF-8, as Python reads it
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode("ascii")
