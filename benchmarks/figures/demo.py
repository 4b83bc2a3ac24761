"""`python -m benchmarks.figures.demo`: records `make demo` as a picture of a terminal.

Runs the demo's commands and writes docs/figures/demo.svg, with their output as it is.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures.terminal import picture

ROOT = Path(__file__).parents[2]
COMMANDS = ("", "--kill-worker", "--kill-worker --restart")


def _runs() -> Iterator[tuple[str, str]]:
    for option in COMMANDS:
        words = ["-m", "engine", *option.split()]
        done = subprocess.run(
            [sys.executable, *words, "--plain"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "examples")},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        yield f"python {' '.join(words)}", done.stdout


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m benchmarks.figures.demo", description=__doc__
    ).parse_args()
    print(picture("demo", "make demo", 128, _runs()))


if __name__ == "__main__":
    main()
