"""The page size of a region: what its file system offers, and what was obtained."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, get_args

from memlane._base.naming import shown
from memlane.errors import InvalidArgument, Unsupported, system_fault

Pages = Literal["auto", "4k", "huge"]
Rung = Literal["4k", "huge", "mixed"]


def wants_huge(pages: str, directory: str) -> bool:
    """Whether to ask for huge pages.

    Raises:
        InvalidArgument: `pages` is none of the three values.
        Unsupported: "huge" was asked for, and the file system does not offer them.
    """
    if pages not in get_args(Pages):
        raise InvalidArgument(f"pages must be one of {get_args(Pages)}, not {pages!r}")
    if pages == "4k":
        return False
    offers = offers_huge(directory)
    if pages == "huge" and not offers:
        where = shown(directory)
        raise Unsupported(
            f"{where} offers no huge pages: mount it with huge=advise (mount -o "
            f"remount,huge=advise {where}; a container needs its own tmpfs with that option), or "
            f"pass pages='auto'"
        )
    return offers


def offers_huge(directory: str) -> bool:
    """Whether the mount options of `directory` give huge pages to mappings that request them."""
    try:
        facts = os.stat(directory)
    except OSError as error:
        raise system_fault(
            error.errno or 0, f"cannot create regions in {shown(directory)}: {error.strerror}"
        ) from None
    device = f"{os.major(facts.st_dev)}:{os.minor(facts.st_dev)}"
    for line in _lines_of("/proc/self/mountinfo"):
        fields = line.split()
        if fields[2] == device:
            return any(
                option in ("huge=always", "huge=within_size", "huge=advise")
                for option in fields[-1].split(",")
            )
    return False


def rung_of(address: int, populated: int) -> Rung:
    """The page size of the mapping at `address`, of which `populated` bytes are populated."""
    huge = 0
    found = False
    for line in _lines_of("/proc/self/smaps"):
        first = line.split(None, 1)[0]
        if "-" in first and not first.endswith(":"):
            if found:
                break
            found = int(first.split("-")[0], 16) == address
        elif found and first == "ShmemPmdMapped:":
            huge = int(line.split()[1]) * 1024
    if huge == 0:
        return "4k"
    # The last huge page may be cut off by the end of the file.
    return "huge" if huge + (2 << 20) > populated else "mixed"


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError as error:
        raise system_fault(error.errno or 0, f"{path} cannot be read (is /proc mounted?)") from None
