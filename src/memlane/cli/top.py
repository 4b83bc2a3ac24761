"""`memlane top`: `ls`, live, with the lag of each reader and the waits of the moment."""

from __future__ import annotations

import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from memlane._base.descriptors import is_readable_within
from memlane.cli import writing
from memlane.cli.ls import shm_line
from memlane.cli.rates import Rates, messages
from memlane.inspect import Segment, segments

_COLUMNS = [
    ("SEGMENT", "left"),
    ("KIND", "left"),
    ("HOLDERS", "left"),
    ("MSG/S", "right"),
    ("LAG", "right"),
    ("WAITS", "right"),
    ("EXTENTS", "right"),
    ("LENT", "right"),
    ("HITS", "right"),
    ("STATE", "left"),
]
_KEYS = "q quit   s sort   f kind   / name   + - interval"
_KINDS = ("", "queue", "store", "region", "tier", "ring")


def _lag(segment: Segment) -> int:
    return max((who.behind for who in segment.participants), default=0)


_SORTS: dict[str, Callable[[Segment, float], tuple[float, str]]] = {
    "name": lambda segment, rate: (0, segment.label or segment.name),
    "rate": lambda segment, rate: (-rate, segment.name),
    "lag": lambda segment, rate: (-_lag(segment), segment.name),
    "size": lambda segment, rate: (-segment.used, segment.name),
}


class View:
    """What is shown: the order, the filter, and the rates from look to look."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._sorts = list(_SORTS)
        self._kinds = list(_KINDS)
        self._name = ""  # shown are those whose names contain it
        self._is_typing = False
        self._rates = Rates()

    def press(self, key: str) -> bool:
        """Returns whether the key ends the display."""
        if self._is_typing and key not in "\x03\x04":
            self._type(key)
            return False
        match key:
            case "q" | "\x03" | "\x04":
                return True
            case "s":
                self._sorts.append(self._sorts.pop(0))
            case "f":
                self._kinds.append(self._kinds.pop(0))
            case "/":
                self._is_typing = True
            case "+":
                self.interval = min(60.0, self.interval * 2)
            case "-":
                self.interval = max(0.25, self.interval / 2)
        return False

    def _type(self, key: str) -> None:
        match key:
            case "\r" | "\n":
                self._is_typing = False
            case "\x1b":
                self._is_typing, self._name = False, ""
            case "\x7f" | "\b":
                self._name = self._name[:-1]
            case _ if key.isprintable():
                self._name += key

    def draw(self, width: int) -> Group:
        """One look at all segments."""
        seen = segments()
        rates = self._rates.of(seen, time.monotonic())
        kind, name = self._kinds[0], self._name
        order = _SORTS[self._sorts[0]]
        known = [each for each in seen if name in each.name or name in each.label]
        shown = [each for each in known if kind in ("", each.kind)]
        shown.sort(key=lambda segment: order(segment, rates.get(segment.name, 0.0)))
        rows = [_row(segment, rates.get(segment.name)) for segment in shown]
        filtered = f", only {kind}" if kind else ""
        keys = f"name: {name}_   Enter done   Esc all names" if self._is_typing else _KEYS
        if name and not self._is_typing:
            keys += f"   name: {name}"
        title = f"{shm_line()}; every {self.interval:g} s, by {self._sorts[0]}{filtered}"
        return Group(Text(title), writing.table(_COLUMNS, rows, width), Text(keys, style="dim"))


def _row(segment: Segment, per_second: float | None) -> list[str]:
    people = segment.participants
    readers = [who for who in people if who.role == "reader"]
    lags = ",".join(str(who.behind) for who in readers[:8]) + (",..." if len(readers) > 8 else "")
    is_queue = segment.kind == "queue"
    lent = sum(who.lent for who in people)
    return [
        writing.title(segment.name, segment.label),
        segment.kind,
        writing.holders(segment),
        writing.rate(per_second),
        lags if is_queue else "",
        str(sum(who.activity == "waiting" for who in people)) if is_queue else "",
        str(people[0].extents) if is_queue and people else "",
        writing.nbytes(lent) if lent else "",
        _hits(segment),
        writing.state(segment),
    ]


def _hits(segment: Segment) -> str:
    """Part of a store's puts that found their object stored already; of a tier's accesses that
    found their block."""
    if segment.kind == "tier":
        return f"{segment.counters['hits'] / max(1, segment.counters['accesses']):.0%}"
    puts = messages(segment) if segment.kind == "store" else None
    if puts is None:
        return ""
    hits = segment.counters["hits"]
    return f"{hits / max(1, hits + puts):.0%}"


@contextmanager
def _keys() -> Iterator[int]:
    """Standard input, key by key."""
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    tty.setcbreak(file)
    try:
        yield file
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def run(interval: float) -> None:
    view = View(interval)
    console = Console(highlight=False)
    with _keys() as file, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.draw(console.width), refresh=True)
            if not is_readable_within(file, view.interval):
                continue
            keys = os.read(file, 64).decode(errors="replace")
            if not keys or any(view.press(key) for key in keys):
                return
