"""Finds where late workers are in their code, by py-spy, for errors."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice, takewhile

from memlane._base.processes import start_ticks
from memlane.inspect.stacks import NoStack, Stack, stacks_of

_SECONDS = 2.0  # for all of them
_FRAMES = 4


def places_of(pids: Iterable[int]) -> dict[int, str]:
    """Returns the calls of each main thread, the innermost first, or why they are unknown."""
    started = {pid: ticks for pid in pids if (ticks := start_ticks(pid)) is not None}
    return {pid: _place(stack) for pid, stack in stacks_of(started, timeout=_SECONDS).items()}


def _place(stack: Stack | NoStack) -> str:
    if isinstance(stack, NoStack):
        return f"; no stack: {stack.reason}"
    own = takewhile(lambda frame: "memlane/workers/" not in frame.file, stack.main)
    calls = " < ".join(map(str, islice(own, _FRAMES)))
    return calls and f"; {calls}"
