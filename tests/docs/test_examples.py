"""Every program in the manual runs as it stands, unless it says why not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.manual import Program, programs
from tests.support import PATIENCE, UNHURRIED
from tests.support.missing import package

PROGRAMS = [program for program in programs() if not program.refusal]


@pytest.mark.parametrize("program", PROGRAMS, ids=[program.name for program in PROGRAMS])
def test_program_runs(program: Program, tmp_path: Path) -> None:
    """Copied into a file and started, it exits with 0 and prints something."""
    for name in program.needs:
        package(name)
    script = tmp_path / "program.py"
    script.write_text(program.text)
    runner = ["-m", *program.module] if program.module else []
    environment = {**os.environ, **UNHURRIED, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, *runner, script],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        env=environment,
        cwd=tmp_path,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert not run.stderr or program.needs  # other packages may warn


def test_there_are_programs() -> None:
    """Each page about starting, and nearly each about how to do something, has one that runs."""
    pages = {program.name.rpartition("-")[0] for program in PROGRAMS}
    assert {"docs/start/broadcast.md", "docs/start/store.md", "docs/start/region.md"} <= pages
    assert len(pages) >= 12
