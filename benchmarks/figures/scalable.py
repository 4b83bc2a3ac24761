"""One SVG file for light and dark pages, made of what matplotlib writes.

Text stays text, coordinates have one decimal, and each style stands once, as a class: its colours
change with the reader's scheme.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from html import escape
from xml.etree import ElementTree

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_NUMBER = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
_LONGEST = 100  # characters of a line of coordinates
_NOT_DRAWN = {f"{_SVG}metadata", f"{_SVG}style"}


def for_both_schemes(drawn: str, title: str, on_dark: Mapping[str, str]) -> str:
    """Returns the file's text. `on_dark`: what each colour of a light page is on a dark one."""
    root = ElementTree.fromstring(drawn)
    classes: dict[str, str] = {}  # by style
    body = list(_lines(root, classes, 1))
    light = [f".{name} {{ {style} }}" for style, name in classes.items()]
    dark = [f".{name} {{ {colors} }}" for name, colors in _dark(classes, on_dark)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{root.get("width")}" '
            f'height="{root.get("height")}" viewBox="{root.get("viewBox")}" role="img">',
            f" <title>{escape(title)}</title>",
            " <style>",
            f"  text {{ font-family: {_FONT} }}",
            *(f"  {rule}" for rule in light),
            "  @media (prefers-color-scheme: dark) {",
            *(f"   {rule}" for rule in dark),
            "  }",
            " </style>",
            *body,
            "</svg>",
            "",
        ]
    )


def _dark(classes: Mapping[str, str], on_dark: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The classes that have a colour, and what it is on dark pages."""
    changed = {light.lower(): dark.lower() for light, dark in on_dark.items()}
    for style, name in classes.items():
        colors = [
            f"{part.split(':')[0]}: {changed[part.split()[-1]]}"
            for part in style.split("; ")
            if part.split()[-1] in changed
        ]
        if colors:
            yield name, "; ".join(colors)


def _lines(element: ElementTree.Element, classes: dict[str, str], depth: int) -> Iterator[str]:
    """Returns what the element contains; groups that say nothing are left out."""
    for child in element:
        if child.tag in _NOT_DRAWN:
            continue
        attributes = _attributes(child, classes)
        if child.tag == f"{_SVG}g" and not attributes:
            yield from _lines(child, classes, depth)
            continue
        tag = child.tag.removeprefix(_SVG)
        begins = f"<{tag}" + "".join(f' {name}="{value}"' for name, value in attributes.items())
        inner = list(_lines(child, classes, depth + 1))
        space = " " * depth
        if inner:
            yield from (f"{space}{begins}>", *inner, f"{space}</{tag}>")
        elif text := (child.text or "").strip():
            yield f"{space}{begins}>{escape(text, quote=False)}</{tag}>"
        elif tag not in ("g", "defs"):
            yield from _wrapped(f"{space}{begins}/>")


def _attributes(element: ElementTree.Element, classes: dict[str, str]) -> dict[str, str]:
    """In the order of the file. A group has no id: nothing refers to it."""
    made = {}
    for name, value in element.attrib.items():
        value = " ".join(value.split())
        if name == "style":
            if style := _style(value):
                made["class"] = classes.setdefault(style, f"s{len(classes)}")
        elif name == "id":
            if element.tag != f"{_SVG}g":
                made["id"] = value
        elif not (name == "transform" and value.startswith("rotate(-0 ")):
            made["href" if name == _LINK else name] = _NUMBER.sub(_rounded, value)
    return made


def _style(text: str) -> str:
    """Without the font's family, which is the same for all text."""
    parts = [part.strip() for part in text.split(";")]
    return "; ".join(part for part in parts if part and not part.startswith("font-family"))


def _rounded(number: re.Match[str]) -> str:
    return f"{round(float(number[0]), 1) + 0.0:g}"  # and no "-0"


def _wrapped(line: str) -> Iterator[str]:
    """Long lists of coordinates, broken between two of them."""
    while len(line) > _LONGEST and (end := line.rfind(" L ", 1, _LONGEST)) > 0:
        yield line[:end]
        line = line[end:]
    yield line
