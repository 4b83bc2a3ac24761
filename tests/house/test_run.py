"""The runner of `make test` counts what ran, and lets nothing pass that did not run."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import run

TESTS = """
import os
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.mark.parametrize("n", [1, 2])
def test_is_skipped(n): pytest.skip("needs a thing: make thing")
@pytest.fixture
def broken():
    yield
    raise OSError("at its end")
def test_fails_at_its_end(broken): pass
"""


def outcome_of(folder: Path, text: str, *options: str) -> run.Outcome:
    """Runs a file with these tests as a group of its own."""
    file = folder / "test_it.py"
    file.write_text(text)
    report = folder / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *options, str(file)]
    group = run.Group([str(file)], command, report, 1.0)
    done = subprocess.run(command, capture_output=True, check=False, cwd=folder)
    outcome = run.Outcome()
    outcome.add(group, done.returncode)
    return outcome


def test_every_case_is_counted_once(tmp_path: Path) -> None:
    """An error after a test that passed is a failure; a reason stands in one line."""
    *lines, last = str(outcome_of(tmp_path, TESTS)).splitlines()
    assert last == "1 passed, 2 failed, 2 skipped"
    assert lines[-1] == "2 skipped: needs a thing: make thing"
    assert [line.rpartition("::")[2] for line in lines[:-1]] == [
        "test_fails",
        "test_fails_at_its_end",
    ]


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("import nothing_of_this_name", ()),
        ("import os\ndef test_dies(): os._exit(3)", ()),
        ("def test_passes(): pass", ("-k", "another")),
        ("", ()),
    ],
    ids=["no import", "a process that dies", "nothing chosen", "no tests"],
)
def test_a_group_that_ran_nothing_has_failed(
    tmp_path: Path, text: str, options: tuple[str, ...]
) -> None:
    """Whatever the exit status is."""
    outcome = outcome_of(tmp_path, text, *options)
    assert (outcome.passed, len(outcome.failed)) == (0, 1), str(outcome)


def test_a_file_that_is_skipped_as_a_whole_has_not_failed(tmp_path: Path) -> None:
    """It is one case, with its reason."""
    text = 'import pytest\npytest.skip("needs a thing: make thing", allow_module_level=True)'
    assert str(outcome_of(tmp_path, text)).splitlines() == [
        "1 skipped: needs a thing: make thing",
        "0 passed, 0 failed, 1 skipped",
    ]


def test_every_file_is_in_one_group_and_the_longest_begin() -> None:
    """Those that the runner knows as long exist, and are alone."""
    everything = [run.ROOT / "tests", Path(run.NATIVE)]
    groups = run.groups_of(everything, "")
    files = [file for group in groups for file in group.files]
    assert len(files) == len({*files}) == len([*run.ROOT.glob("tests/**/test_*.py")]) + 1
    assert {*run.LONG} <= {*files}
    assert [group.expected for group in groups] == sorted(
        (group.expected for group in groups), reverse=True
    )
    assert all(group.expected <= run.BATCH or len(group.files) == 1 for group in groups)
