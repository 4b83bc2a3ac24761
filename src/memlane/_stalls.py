"""A wait that lasts says in the log whom it waits for: the culprit first.

Called by the native waits only, when a line is due (`native/bindings/end.hpp`); nothing imports
this module, and logging with it, before that.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from memlane._failures import Awaited, absent_readers, names_of

if TYPE_CHECKING:
    from memlane._failures import RingEnd

logger = logging.getLogger("memlane")


def report(end: RingEnd, wait: str, waited: float) -> None:
    """One line about a wait of `end` that has lasted `waited` seconds."""
    logger.warning("%s", _line(end, wait, waited))


def _line(end: RingEnd, wait: str, waited: float) -> str:
    match wait:
        case "chunk":
            return (
                f"{Awaited(end)} kept the writer (pid {os.getpid()}) "
                f"waiting for {waited:.1f} s: No available shared memory broadcast block"
            )
        case "ready":
            return (
                f"{names_of(absent_readers(end))} kept pid {os.getpid()} waiting for "
                f"{waited:.1f} s: not everybody has attached to the queue"
            )
        case _:
            rank = end.ranks[end.slot - 1]
            return (
                f"{Awaited(end)} kept reader {rank} (pid {os.getpid()}) waiting for {waited:.1f} s"
            )
