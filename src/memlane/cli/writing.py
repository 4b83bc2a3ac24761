"""Formats for the command line: sizes, durations, processes, tables that fit the terminal.

What others chose, such as a file's name or a process's title, passes `printable` on its way out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.text import Text

from memlane._base import processes
from memlane._base.lifetime import undone_by
from memlane._base.printable import printable
from memlane.inspect.segment import Participant, Segment

_piped_width = 200  # a pipe has no width: lines are then not broken
_LEAST = 10  # a name is not shortened to less
_HASH = 10  # characters of a generated name that are shown where space is short


def print_to_width(columns: int) -> None:
    """From now on a pipe has that width: what is written there is for a terminal."""
    global _piped_width
    _piped_width = columns


def console() -> Console:
    """Standard output; plain text without colours if it is piped."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False, emoji=False)
    plain: dict[str, Any] = {"color_system": None, "width": _piped_width}
    return Console(highlight=False, markup=False, emoji=False, **plain)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Each on one line; on a terminal that is narrower, broken between words and indented."""
    texts: Iterable[str] = list(map(printable, lines))
    if not texts:
        return
    if console.is_terminal:
        texts = (part for text in texts for part in _broken(text, console.width))
    console.print("\n".join(texts), soft_wrap=True)


def _broken(text: str, width: int) -> list[str]:
    """
    >>> _broken("  waits for reader 2 (pid 9)", 20)
    ['  waits for reader 2', '    (pid 9)']
    """
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    more: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, width, subsequent_indent=indent, **more) or [text]


def json_text(value: Any, indent: int | None = None) -> str:
    return json.dumps(_printable(value), indent=indent)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {name: _printable(each) for name, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, (list, tuple)) else value


def print_json(value: Any) -> None:
    print(json_text(value, indent=2))


@contextmanager
def replacing(output: Path) -> Iterator[IO[str]]:
    """A file to write, for this user only, that takes the place of `output` when it is complete:
    neither it nor what it replaces is written to through a link that another user may have made.
    """
    is_own = os.path.lexists(output) and os.lstat(output).st_uid in (0, os.geteuid())
    if is_own and output.exists() and not output.is_file():  # such as /dev/stdout
        with output.open("w") as file:
            yield file
        return
    opened, part = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)
    with undone_by(partial(Path(part).unlink, missing_ok=True)):
        with open(opened, "w") as file:
            yield file
        os.replace(part, output)


def nbytes(count: float) -> str:
    """
    >>> nbytes(0), nbytes(4096), nbytes(168_100_000), nbytes(13.2e9)
    ('0', '4.0K', '160M', '12G')
    """
    if count < 1024:
        return f"{count:.0f}"
    for unit in "KMGT":
        count /= 1024
        if count < 1024 or unit == "T":
            break
    return f"{count:.1f}{unit}" if count < 10 else f"{count:.0f}{unit}"


def duration(seconds: float) -> str:
    """
    >>> duration(0.25), duration(7.04), duration(150), duration(7500), duration(200_000)
    ('0.2s', '7.0s', '2m', '2h', '2d')
    """
    if seconds < 60:
        return f"{seconds:.1f}s"
    for limit, size, unit in ((3600, 60, "m"), (172_800, 3600, "h"), (float("inf"), 86_400, "d")):
        if seconds < limit:
            return f"{int(seconds / size)}{unit}"
    return ""


def rate(per_second: float | None) -> str:
    """
    >>> rate(None), rate(0), rate(0.5), rate(1234), rate(2_500_000)
    ('', '0', '0.5', '1.2k', '2.5M')
    """
    if per_second is None:
        return ""
    if per_second < 1000:
        return f"{per_second:.1f}".removesuffix(".0")
    if per_second < 1e6:
        return f"{per_second / 1e3:.1f}k"
    return f"{per_second / 1e6:.1f}M"


def short_name(name: str) -> str:
    """A generated name is told apart by its first digits.

    >>> short_name("memlane-00112233445566778899aabbccddeeff"), short_name("images")
    ('memlane-0011223344', 'images')
    """
    prefix, dash, digits = name.partition("-")
    if (prefix, len(digits)) == ("memlane", 32):
        return f"{prefix}{dash}{digits[:_HASH]}"
    return name


def title(name: str, label: str) -> str:
    """Returns a segment's name for people, or else its file's name, shortened."""
    return label or short_name(name)


def process(pid: int) -> str:
    """Pid and title, or program and script, never arguments."""
    return f"{pid} {processes.name_of(pid)}".rstrip()


def holders(segment: Segment) -> str:
    """The writer's process, else the first that holds it, and how many more."""
    pids = list(segment.pids)
    first = next(
        (who.pid for who in segment.participants[:1] if who.pid in pids and not who.is_remote), None
    )
    if first is None:
        first = pids[0] if pids else None
    if first is None:
        return "nobody"
    more = f" +{len(pids) - 1}" if len(pids) > 1 else ""
    return f"{process(first)}{more}"


def size(segment: Segment) -> str:
    """The file's size; for a tier the bytes that fit, for a pool the blocks."""
    if segment.kind == "tier":
        return _blocks(segment, segment.geometry["blocks"])
    return nbytes(segment.size)


def used(segment: Segment) -> str:
    """Bytes of /dev/shm; of a tier what is stored."""
    if segment.kind == "tier":
        return _blocks(segment, segment.counters["used"])
    return nbytes(segment.used)


def _blocks(segment: Segment, count: int) -> str:
    each = segment.geometry["block_bytes"]
    return nbytes(count * each) if each else f"{count} blk"


def readers(segment: Segment) -> str:
    """Attached of expected; a region's holders."""
    if segment.kind == "region":
        return str(len(segment.participants))
    expected = [who for who in segment.participants if who.role == "reader"]
    attached = [who for who in expected if who.state not in ("absent", "closed", "dead")]
    return f"{len(attached)}/{len(expected)}" if expected else ""


def state(segment: Segment) -> str:
    """The worst first, in a word or two."""
    if segment.is_leftover:
        return "leftover"
    if segment.problem is not None:
        return "unreadable"
    if segment.counters.get("stalled"):
        return "stalled"
    for what in ("dead", "stopped"):
        count = sum(who.state == what for who in segment.participants)
        if count:
            return f"{count} {what}"
    if any(_is_missing(who, segment) for who in segment.participants):
        return "attaching"
    if not segment.pids:
        return "not held"
    return "latest" if segment.mode == "latest" else ""


def _is_missing(who: Participant, segment: Segment) -> bool:
    return who.state == "absent" and not (who.role == "reader" and segment.has_late_readers)


def table(columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], width: int) -> Text:
    """A line for each row, never wider than `width`: long names are shortened, numbers never.

    Args:
        columns: title, and `left` or `right`; those of the left are text, which may be shortened.
    """
    titles = [title for title, _ in columns]
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, cells)) for cells in zip(titles, *shown, strict=True)]
    names = [number for number, (_, side) in enumerate(columns) if side == "left"]
    while (excess := sum(widths) + len(widths) - 1 - width) > 0:
        widest = max(names, key=lambda number: widths[number])
        if widths[widest] <= _LEAST:
            break
        others = [widths[number] for number in names if number != widest]
        widths[widest] -= max(1, min(excess, widths[widest] - max([*others, _LEAST])))
    lines = Text(no_wrap=True, overflow="crop")
    for number, cells in enumerate([titles, *shown]):
        placed = zip(cells, widths, columns, strict=True)
        line = " ".join(_cell(cell, wide, side) for cell, wide, (_, side) in placed).rstrip()
        lines.append(line + "\n" * (number < len(rows)), style="" if number else "bold")
    return lines


def _cell(text: str, width: int, side: str) -> str:
    if len(text) > width:
        text = text[: width - 1] + "…"
    return text.rjust(width) if side == "right" else text.ljust(width)
