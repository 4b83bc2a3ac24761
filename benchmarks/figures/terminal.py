"""Pictures of terminals: commands and their output as it is, once or over time."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from benchmarks import needs

PICTURES = Path(__file__).parents[2] / "docs" / "figures"


def picture(name: str, title: str, columns: int, commands: Iterable[tuple[str, str]]) -> Path:
    """Writes docs/figures/NAME.svg with the (command, output) pairs; returns its path.

    In lines that begin with a space, the first 22 characters are a bold label if one is there.
    """
    needs.package("rich", "recording")
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=columns, file=open(os.devnull, "w"))  # noqa: SIM115
    for command, output in commands:
        console.print(Text(f"$ {command}", "bold cyan"))
        for line in output.splitlines():
            label, text = line[:22], line[22:]
            is_labelled = line[:1] == " " and label.endswith("  ")
            console.print(Text.assemble((label, "bold"), text) if is_labelled else Text(line))
        console.print()
    path = PICTURES / f"{name}.svg"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(console.export_svg(title=title, unique_id=name))
    return path


class Screen(NamedTuple):
    """A terminal.

    Attributes:
        title: what it shows, above it.
        looks: its lines, with colours as ANSI codes, at each look.
    """

    title: str
    looks: list[list[str]]


_WIDTH, _HEIGHT, _EDGE = 8.4, 18.0, 14.0  # pixels: of a character, of a line, around a terminal
_STYLE = """\
text { font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; white-space: pre; fill: #d4d7d9 }
.title { fill: #8b949e; font-weight: bold }
.bold { font-weight: bold }
.past { visibility: hidden }
"""  # noqa: E501


def moving_picture(name: str, screens: list[Screen], columns: int, seconds: float) -> Path:
    """Writes docs/figures/NAME.svg: the terminals below each other, in a loop of `seconds`. A line
    is drawn once for as long as it stays. Who wants no motion sees the last look."""
    needs.package("rich", "recording")
    count = len(screens[0].looks)
    body: list[str] = []
    spans: set[tuple[int, int]] = set()
    top, width = 0.0, columns * _WIDTH + 2 * _EDGE
    for screen in screens:
        rows = len(screen.looks[0])
        height = (rows + 1) * _HEIGHT + 1.5 * _EDGE
        box = f'width="{width:.1f}" height="{height:.1f}" rx="6" fill="#16191d"'
        body.append(f'<rect y="{top:.1f}" {box}/>')
        first = top + _EDGE + _HEIGHT / 2
        title = escape(screen.title)
        body.append(f'<text class="title" x="{_EDGE}" y="{first:.1f}">{title}</text>')
        for row in range(rows):
            y, begin = first + (row + 1) * _HEIGHT, 0
            for line, same in groupby(look[row] for look in screen.looks):
                span = begin, begin + len(list(same))
                begin = span[1]
                if parts := "".join(_parts(line)):
                    spans.add(span)
                    body.append(f'<text class="{_class(span, count)}" y="{y:.1f}">{parts}</text>')
        top += height + 6
    moves = [_motion(span, count, seconds) for span in sorted(spans) if span != (0, count)]
    path = PICTURES / f"{name}.svg"
    path.write_text(
        "\n".join(
            [
                f'<svg viewBox="0 0 {width:.1f} {top - 6:.1f}" xmlns="http://www.w3.org/2000/svg">',
                f"<style>\n{_STYLE}@media (prefers-reduced-motion: no-preference) {{",
                *moves,
                "}\n</style>",
                *body,
                "</svg>\n",
            ]
        )
    )
    return path


def _class(span: tuple[int, int], count: int) -> str:
    if span == (0, count):
        return ""
    return f"m{span[0]}-{span[1]}" + ("" if span[1] == count else " past")


def _motion(span: tuple[int, int], count: int, seconds: float) -> str:
    """The rules by which a line is seen from one look to another."""
    begin, end = (f"{100 * look / count:.1f}%" for look in span)
    steps = {"0%": "hidden", begin.replace("0.0%", "0%"): "visible"}
    if span[1] < count:
        steps[end] = "hidden"
    frames = " ".join(f"{at} {{ visibility: {how} }}" for at, how in steps.items())
    name = f"m{span[0]}-{span[1]}"
    rule = f".{name} {{ animation: {name} {seconds:g}s step-end infinite }}"
    return f"@keyframes {name} {{ {frames} }}\n{rule}"


def _parts(line: str) -> Iterator[str]:
    """Its words, each at its column, so that a wider font of the reader's changes nothing."""
    from rich.console import Console
    from rich.terminal_theme import MONOKAI
    from rich.text import Text

    column = 0
    for part in Text.from_ansi(line).render(Console(color_system="truecolor")):
        text, style = part.text.rstrip("\n"), part.style
        if text.strip():
            look = ' class="bold"' if style is not None and style.bold else ""
            if style is not None and style.color is not None and not style.color.is_default:
                look += f' fill="{style.color.get_truecolor(MONOKAI).hex}"'
            x, length = _EDGE + column * _WIDTH, len(text) * _WIDTH
            yield f'<tspan x="{x:.1f}" textLength="{length:.1f}"{look}>{escape(text)}</tspan>'
        column += len(text)
