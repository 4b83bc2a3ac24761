"""GitHub's workflows run targets of the Makefile only, and have as few rights as possible."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.documents import ROOT
from tests.support.makefile import TARGETS

WORKFLOWS = sorted((ROOT / ".github/workflows").iterdir())
ACTIONS = {
    "actions/checkout",
    "actions/download-artifact",
    "actions/setup-python",
    "actions/upload-artifact",
    "pypa/gh-action-pypi-publish",
}
COMMAND = re.compile(r"(?:sudo )?make ([a-z-]+)(?: [A-Z]+=(?:'[^']*'|\S*))?")

every_workflow = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)


@every_workflow
def test_steps_are_targets(workflow: Path) -> None:
    """Whatever a workflow runs, a developer can run."""
    steps = re.findall(r"\brun:(.*)", workflow.read_text())
    assert steps
    for step in steps:
        command = COMMAND.fullmatch(step.strip())
        assert command, f"{step} is not one target"
        assert command[1] in TARGETS


@every_workflow
def test_actions_are_few_and_pinned(workflow: Path) -> None:
    """An action is named by the hash of a commit, which nobody can move; a comment says which."""
    for used in re.findall(r"\buses:(.*)", workflow.read_text()):
        pinned = re.fullmatch(r" ([\w/-]+)@[0-9a-f]{40}  # v\d+\.\d+\.\d+", used)
        assert pinned, used
        assert pinned[1] in ACTIONS


def test_an_action_has_one_version() -> None:
    """In all workflows."""
    text = "".join(path.read_text() for path in WORKFLOWS)
    assert len(set(re.findall(r"\buses:(.*)", text))) == len(ACTIONS)


def test_zizmor_finds_nothing() -> None:
    """No injection, no credentials left behind, no right that is not needed or not explained."""
    zizmor = Path(sys.executable).parent / "zizmor"
    run = subprocess.run(
        [zizmor, "--offline", "--no-progress", ".github"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
