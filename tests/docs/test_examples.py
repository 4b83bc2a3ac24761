"""Every program in the manual runs as it stands, unless it says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest

from tests.docs.manual import ROOT, Program, programs
from tests.support import PATIENCE, UNHURRIED
from tests.support.missing import package

PROGRAMS = [program for program in programs() if not program.refusal]
PARTS = [program for program in programs() if program.source]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_program_runs(program: Program, tmp_path: Path) -> None:
    """Copied into a file and started, it exits with 0 and prints something."""
    for name in program.needs:
        package(name)
    script = tmp_path / "program.py"
    script.write_text(program.text)
    warnings = _run([*(["-m", *program.module] if program.module else []), script], tmp_path)
    assert not warnings or program.needs  # other packages may warn


@pytest.mark.parametrize("source", sorted({part.source for part in PARTS}))
def test_the_source_of_a_part_runs(source: str, tmp_path: Path) -> None:
    """The whole program does, and has each part word for word, at any indentation."""
    text, parts = (ROOT / source).read_text(), [part for part in PARTS if part.source == source]
    for part in parts:
        assert any(indent(part.text, " " * spaces) in text for spaces in (0, 4, 8, 12)), part.name
    needs = {name for part in parts for name in part.needs}
    for name in needs:
        package(name)
    warnings = _run([ROOT / source], tmp_path)
    assert not warnings or needs


def _run(arguments: list[str | Path], folder: Path) -> str:
    """Runs Python, which prints something and exits with 0; returns what it writes to stderr."""
    run = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env={**os.environ, **UNHURRIED, "OMP_NUM_THREADS": "1"},
        cwd=folder,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
    return run.stderr


def test_there_are_programs() -> None:
    """Each page about starting, and nearly each about how to do something, has one that runs,
    whole or as a part."""
    pages = {program.name.rpartition("-")[0] for program in PROGRAMS}
    assert {"docs/start/broadcast.md", "docs/start/store.md", "docs/start/region.md"} <= pages
    assert len(pages | {part.name.rpartition("-")[0] for part in PARTS}) >= 18
