"""`memlane top`: `ls`, live, with the lag of each reader and the waits of the moment."""

from __future__ import annotations

import os
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime

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
    ("STATE", "left"),
    ("KIND", "left"),
    ("HOLDERS", "left"),
    ("MSG/S", "right"),
    ("LAG", "right"),
    ("WAITS", "right"),
    # Of wide terminals:
    ("LENT", "right"),
    ("HITS", "right"),
    ("EXTENTS", "right"),
]
_KEYS = "q quit   s sort   f kind   / name   + - interval   arrows scroll"
_SEQUENCES = {"\x1b[A": "k", "\x1bOA": "k", "\x1b[B": "j", "\x1bOB": "j"}
_SEQUENCES |= {"\x1b[5~": "b", "\x1b[6~": " "}  # page up and down
_NARROW = 100  # columns of a terminal that has space for 7 of these
_ALL = 1 << 30  # lines
_AROUND = 3  # lines beside the rows
_KINDS = ("", "queue", "store", "region", "tier", "ring")


def _lag(segment: Segment) -> int:
    return max((who.behind for who in segment.participants), default=0)


def _badness(segment: Segment) -> int:
    """Sorts problems first, then queues in which somebody waits for readers that lag."""
    if writing.state(segment) not in ("", "latest"):
        return -2
    is_blocked = any(who.activity == "waiting" for who in segment.participants[:1])
    return -1 if is_blocked else 0


_SORTS: dict[str, Callable[[Segment, float], tuple[float, str]]] = {
    "state": lambda segment, rate: (_badness(segment), segment.label or segment.name),
    "rate": lambda segment, rate: (-rate, segment.name),
    "lag": lambda segment, rate: (-_lag(segment), segment.name),
    "size": lambda segment, rate: (-segment.used, segment.name),
    "name": lambda segment, rate: (0, segment.label or segment.name),
}


class View:
    """The view: the order, the filter, and the rates from look to look."""

    def __init__(self, interval: float) -> None:
        self.interval = interval
        self._sorts = list(_SORTS)
        self._kinds = list(_KINDS)
        self._name = ""  # shown are those whose names contain it
        self._is_typing = False
        self._first = 0  # the row that is shown first
        self._page = 1
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
            case "j" | "k" | " " | "b":
                rows = {"j": 1, "k": -1, " ": self._page, "b": -self._page}[key]
                self._first = max(0, self._first + rows)
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

    def draw(self, width: int, height: int) -> Group:
        """One look at all segments, as much of it as fits."""
        seen = segments()
        rates = self._rates.of(seen, time.monotonic())
        kind, name = self._kinds[0], self._name
        order = _SORTS[self._sorts[0]]
        known = [each for each in seen if name in each.name or name in each.label]
        shown = [each for each in known if kind in ("", each.kind)]
        shown.sort(key=lambda segment: order(segment, rates.get(segment.name, 0.0)))
        self._page = max(1, height - _AROUND)
        self._first = max(0, min(self._first, len(shown) - self._page))
        part = shown[self._first : self._first + self._page]
        rows = [_row(segment, rates.get(segment.name)) for segment in part]
        filtered = f", only {kind}" if kind else ""
        keys = f"name: {name}_   Enter done   Esc all names" if self._is_typing else _KEYS
        if name and not self._is_typing:
            keys += f"   name: {name}"
        if len(part) < len(shown):
            keys = f"{self._first + 1}-{self._first + len(part)} of {len(shown)}   {keys}"
        title = f"{shm_line()}; every {self.interval:g} s, by {self._sorts[0]}{filtered}"
        count = len(_COLUMNS) if width >= _NARROW else 7
        table = writing.table(_COLUMNS[:count], [row[:count] for row in rows], width)
        return Group(_line(title), table, _line(keys, "dim"))


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _row(segment: Segment, per_second: float | None) -> list[str]:
    people = segment.participants
    readers = [who for who in people if who.role == "reader"]
    lags = ",".join(str(who.behind) for who in readers[:8]) + (",..." if len(readers) > 8 else "")
    is_queue = segment.kind == "queue"
    lent = sum(who.lent for who in people)
    return [
        writing.title(segment.name, segment.label),
        writing.state(segment),
        segment.kind,
        writing.holders(segment),
        writing.rate(per_second),
        lags if is_queue else "",
        str(sum(who.activity == "waiting" for who in people)) if is_queue else "",
        writing.nbytes(lent) if lent else "",
        _hits(segment),
        str(people[0].extents) if is_queue and people else "",
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


def _is_plain() -> bool:
    """Returns whether there is no terminal, or one that cannot move its cursor."""
    is_dumb = os.environ.get("TERM", "") in ("", "dumb", "unknown")
    return is_dumb or not (sys.stdin.isatty() and sys.stdout.isatty())


def _print_looks(view: View) -> None:
    """Each look below the one before, without keys, until the process is ended."""
    console = writing.console()
    while True:
        title, table, _ = view.draw(console.width, _ALL).renderables
        console.print(f"{datetime.now():%Y-%m-%d %H:%M:%S} {title}", soft_wrap=True)
        console.print(table)
        sys.stdout.flush()
        time.sleep(view.interval)


def run(interval: float) -> None:
    """Shows the segments until a key or a signal ends it."""
    view = View(interval)
    if _is_plain():
        _print_looks(view)
    console = Console(highlight=False)
    with _keys() as file, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(view.draw(console.width, console.height), refresh=True)
            if not is_readable_within(file, view.interval):
                continue
            keys = os.read(file, 64).decode(errors="replace")
            for sequence, key in _SEQUENCES.items():
                keys = keys.replace(sequence, key)
            if not keys or any(view.press(key) for key in keys):
                return
