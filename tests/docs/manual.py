"""The manual's source: its pages, code blocks, tables and links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("**/*.md"))
TROUBLESHOOTING = sorted((ROOT / "docs/troubleshooting").glob("*.md"))
# Pages whose title is the line of another program, shown as that program writes it.
ENGINE_LINES = {
    "no-available-block.md",
    "sglang-no-available-block.md",
    "leaked-shared-memory.md",
    "bus-error.md",
    "file-exists.md",
    "insufficient-space.md",
    "rpc-timed-out.md",
}
# The lines that people meet: `lines`, and in `text` their cause and what to do.
ENTRIES = [
    entry
    for group in tomllib.loads((ROOT / "docs/troubleshooting/lines.toml").read_text()).values()
    for entry in group
]
LINES = [line for entry in ENTRIES for line in entry["lines"]]

_PYTHON = re.compile(r"(?:^<!-- (.*?) -->\n)?^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Program(NamedTuple):
    """A block of Python in a page, and what the comment before it says about running it."""

    name: str
    text: str
    refusal: str  # why it is not run; empty if it is
    source: str  # the file of which it is a part; empty if it is a whole program
    needs: tuple[str, ...]  # modules
    module: tuple[str, ...]  # what runs it: `python -m module arguments file`


def programs(*pages: Path) -> list[Program]:
    """The programs of the given pages (default: of the manual)."""
    found = []
    for page in pages or PAGES:
        for number, match in enumerate(_PYTHON.finditer(page.read_text()), start=1):
            name = f"{page.relative_to(ROOT)}-{number}"
            found.append(_program(name, match.group(2), match.group(1) or ""))
    return found


def _program(name: str, text: str, comment: str) -> Program:
    refusal = source = ""
    needs: tuple[str, ...] = ()
    module: tuple[str, ...] = ()
    for part in filter(None, comment.split("; ") if "not run" not in comment else [comment]):
        key, _, value = part.partition(": ")
        if key == "not run":
            refusal = value
        elif key == "from":
            refusal, source = "a part", value
        elif key == "needs":
            needs = tuple(value.split(", "))
        elif key == "run by":
            module = tuple(value.split())
        else:
            raise ValueError(f"{name}: a comment before Python says {part!r}")
    return Program(name, text, refusal, source, needs, module)


def tables(page: Path) -> dict[str, list[list[str]]]:
    """The rows (without the head) of the tables under each heading."""
    found: dict[str, list[list[str]]] = {}
    heading, rows = "", 0
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if line.startswith("|"):
            rows += 1
            if rows > 2:
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                found.setdefault(heading, []).append(cells)
        else:
            rows = 0
    return found
