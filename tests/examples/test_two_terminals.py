"""Two programs that did not start each other, as the manual shows them."""

import subprocess
import sys
from pathlib import Path

from tests.docs.manual import ROOT, programs
from tests.examples.demo import RUN

EXAMPLE = ROOT / "examples/two_terminals"


def test_a_handle_in_a_folder(tmp_path: Path) -> None:
    """The reader gets every message, both end by themselves, and the file is gone."""
    with subprocess.Popen(
        [sys.executable, EXAMPLE / "writer.py", tmp_path], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "waiting for a reader\n"
        reader = subprocess.run(
            [sys.executable, EXAMPLE / "reader.py", tmp_path],
            capture_output=True,
            text=True,
            timeout=RUN,
            check=False,
        )
        assert writer.wait(timeout=RUN) == 0
    assert reader.stdout == "{'step': 0}\n{'step': 1}\n{'step': 2}\n", reader.stderr
    assert not list(tmp_path.iterdir())


def test_the_manual_shows_these_programs() -> None:
    """Word for word."""
    shown = [program.text for program in programs(ROOT / "docs/start/two-terminals.md")][:2]
    assert shown == [(EXAMPLE / name).read_text() for name in ("writer.py", "reader.py")]
