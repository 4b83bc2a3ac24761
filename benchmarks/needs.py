"""Checks for what a benchmark needs besides memlane. Checked before anything is measured.

If something is missing, the program exits with one sentence that says how to get it.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def package(name: str, what: str) -> None:
    if importlib.util.find_spec(name) is None:
        sys.exit(f"{what} needs {name}, which is not installed here: pip install {name}")


def compiler() -> str:
    """The name of the C++ compiler's command."""
    if shutil.which("g++") is None:
        sys.exit("this benchmark compiles a program to compare with: install g++")
    return "g++"


def native_program(name: str) -> Path:
    """The path of a program that is built with the C++ tests."""
    program = ROOT / "build/native/native/tests" / name
    if not program.exists():
        sys.exit(f"{program} has not been built: run `make bench-peers` first")
    return program
