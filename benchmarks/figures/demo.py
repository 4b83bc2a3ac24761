"""`python -m benchmarks.figures.demo`: records `make demo` as a picture of a terminal.

Runs the demo's two commands and writes docs/figures/demo.svg, with their output as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from benchmarks import needs

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "figures" / "demo.svg"
COLUMNS = 128
COMMANDS = ("", "--kill-worker")


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.figures.demo", description=__doc__
    ).parse_args()
    needs.package("rich", "recording")
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    for option in COMMANDS:
        words = ["-m", "engine", *option.split()]
        done = subprocess.run(
            [sys.executable, *words, "--plain"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        console.print(Text(f"$ python {' '.join(words)}", "bold cyan"))
        for line in done.stdout.splitlines():
            label, text = line[:22], line[22:]
            console.print(Text.assemble((label, "bold"), text) if line[:1] == " " else Text(line))
        console.print()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    PICTURE.write_text(console.export_svg(title="make demo", unique_id="demo"))
    print(PICTURE)


if __name__ == "__main__":
    main()
