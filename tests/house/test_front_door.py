"""What the README shows runs as it stands, and the commands it names exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(EXAMPLES)))
def test_example_runs(number: int, tmp_path: Path) -> None:
    """Copied into a file and started, an example ends well and says something."""
    script = tmp_path / "example.py"
    script.write_text(EXAMPLES[number])
    run = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert not run.stderr


def test_there_are_examples() -> None:
    """The test above has something to run."""
    assert EXAMPLES


def test_named_targets_exist() -> None:
    """Every `make target` in the documents is a target of the Makefile."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in ROOT.glob("*.md"):
        assert set(re.findall(r"`make ([\w-]+)`", document.read_text())) <= targets, document


def test_named_files_exist() -> None:
    """Every path that the documents name is there."""
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for path in re.findall(
            r"`((?:native|src|tests|examples|benchmarks|verification)/[\w./-]+)`",
            document.read_text(),
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"
