"""Two programs that did not start each other, as the manual shows them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.manual import ROOT, programs
from tests.examples.demo import RUN
from tests.support import asleep, until

EXAMPLE = ROOT / "examples/two_terminals"


@pytest.mark.parametrize("first", ["writer.py", "reader.py"])
def test_two_terminals_meet_by_a_name(first: str, tmp_path: Path) -> None:
    """The reader gets every message, both end by themselves, and the folder is empty."""
    environment = {**os.environ, "MEMLANE_RUN": str(tmp_path / "run")}
    second = "reader.py" if first == "writer.py" else "writer.py"
    ends = {}
    for name in (first, second):
        ends[name] = subprocess.Popen(
            [sys.executable, EXAMPLE / name],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        if name == "writer.py" and (stdout := ends[name].stdout) is not None:
            assert stdout.readline() == "waiting for a reader\n"
        elif name == first:
            until((tmp_path / "run").exists, "it looks for the name")
            until(lambda: asleep(ends["reader.py"].pid), "it waits")
    shown, errors = ends["reader.py"].communicate(timeout=RUN)
    assert shown == "{'step': 0}\n{'step': 1}\n{'step': 2}\n", errors
    assert ends["writer.py"].communicate(timeout=RUN) == ("", "")
    assert [end.returncode for end in ends.values()] == [0, 0]
    assert not list((tmp_path / "run").iterdir())


def test_the_manual_shows_these_programs() -> None:
    """Word for word."""
    shown = [program.text for program in programs(ROOT / "docs/start/two-terminals.md")][:2]
    assert shown == [(EXAMPLE / name).read_text() for name in ("writer.py", "reader.py")]
