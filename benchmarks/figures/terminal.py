"""Pictures of a terminal: commands, and their output as it is."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

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
