"""The folder with the name of vLLM's region, and memlane's region as a file in it.

vLLM's own class cannot open a folder, and memlane refuses a file: whichever comes first takes the
name, so processes of the two kinds never share a region.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from memlane._base.lifetime import undone_by
from memlane.engines.vllm._engine import VLLM
from memlane.errors import SegmentRefused, SystemFault, foreign_segment, system_fault

FILE = "memlane"
T = TypeVar("T")


def within(path: str, start: Callable[[], T]) -> T:
    """Calls `start` with the folder in place; if it fails, removes the folder unless it is used."""
    for tries_left in reversed(range(100)):
        try:
            _make(path)
            with undone_by(lambda: remove(path)):
                return start()
        except SystemFault as error:
            # The last process of an earlier region has just removed the folder.
            if error.errno != errno.ENOENT or not tries_left:
                raise
    raise AssertionError


def remove(path: str) -> None:
    """Removes the folder unless it is used."""
    with suppress(OSError):
        os.rmdir(path)


def _make(path: str) -> None:
    try:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        facts = os.lstat(path)
    except OSError as error:
        raise system_fault(error.errno or 0, f"cannot create the folder {path}") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise SegmentRefused(
            f"{path} is not a folder: vLLM's own region has that name, and this process uses "
            f"memlane's. Set {VLLM.variable}=region in every process of the engine, or in none; if "
            f"all of them have ended, remove {path}"
        )
    if facts.st_uid != os.geteuid():
        raise foreign_segment(path, facts.st_uid, "run all workers as one user")
