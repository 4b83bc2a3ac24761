"""`memlane open`: reads a queue by its name, and prints a line for each message."""

from __future__ import annotations

import reprlib
import sys
from typing import Any

from memlane import MessageQueue
from memlane._base.printable import printable


class _Line(reprlib.Repr):
    """Values in a line, and arrays by shape and type."""

    def __init__(self) -> None:
        super().__init__()
        self.maxdict = self.maxlist = self.maxtuple = 20
        self.maxstring = self.maxother = self.maxlong = 120

    def repr1(self, value: Any, level: int) -> str:
        shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
        if shape and dtype is not None:
            return f"<{type(value).__name__} {tuple(shape)} {dtype}>"
        return super().repr1(value, level)


def run(name: str, rank: int | None, timeout: float | None, count: int | None) -> None:
    """Ends when the writer closes the queue, or after `count` messages.

    Raises:
        MemlaneError: as `MessageQueue.open`, and as `dequeue`.
    """
    line = _Line()
    with MessageQueue[Any].open(name, rank, timeout=timeout) as queue:
        print(f"reader {queue.statistics().rank} of {name}", file=sys.stderr, flush=True)
        for number, message in enumerate(queue, 1):
            print(printable(line.repr(message)), flush=True)
            if number == count:
                return
