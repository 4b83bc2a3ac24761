"""The programs in the documents run as they stand, and the commands they name exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE, UNHURRIED, private_shm, unshare_refusal
from tests.support.documents import EXAMPLES, ROOT
from tests.support.makefile import TARGETS


def run_example(text: str, folder: Path, *command: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "example.py"
    script.write_text(text)
    return subprocess.run(
        [*command, script],
        env={**os.environ, **UNHURRIED},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


MAIN = 'if __name__ == "__main__":'
WITH_CHILDREN = {name: text for name, text in EXAMPLES.items() if MAIN in text}
examples = pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)


@pytest.mark.wheel
@examples
def test_example_runs(text: str, tmp_path: Path) -> None:
    """Copied into a file and started, an example exits with 0 and prints something."""
    run = run_example(text, tmp_path, sys.executable)
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert not run.stderr


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
@examples
def test_example_fits_a_container(text: str, tmp_path: Path) -> None:
    """The same with the 64 MiB of /dev/shm that Docker gives a container."""
    run = run_example(text, tmp_path, *private_shm("64m"))
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert not run.stderr


@pytest.mark.parametrize("text", WITH_CHILDREN.values(), ids=WITH_CHILDREN)
def test_example_fails_with_its_children(text: str, tmp_path: Path) -> None:
    """A child that fails makes the program fail, and nothing hangs."""
    head, main, rest = text.partition(MAIN)
    head = re.sub(
        r"^(def \w+\(.*\n)", r"\1    raise RuntimeError('a child fails')\n", head, flags=re.M
    )
    failing = head + main + rest.replace("timeout=30", "timeout=2")
    run = run_example(failing, tmp_path, sys.executable)
    assert run.returncode == 1
    assert "a child fails" in run.stderr


def test_there_are_examples() -> None:
    """The tests above have something to run."""
    shown = {name.rpartition("-")[0] for name in EXAMPLES}
    assert {"README.md", "docs/start/broadcast.md", "docs/start/store.md"} <= shown


def test_named_targets_exist() -> None:
    """Every `make target` in the documents is a target of the Makefile, of several as well."""
    for document in ROOT.glob("*.md"):
        for named in re.findall(r"`make ([\w -]+)`", document.read_text()):
            assert {*named.split()} <= TARGETS, document


def test_named_files_exist() -> None:
    """Every path that the documents name exists."""
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for path in re.findall(
            r"`((?:native|src|tests|examples|benchmarks|verification)/[\w./-]+)`",
            document.read_text(),
        ):
            assert (ROOT / path).exists(), f"{document.name} names {path}"


def test_code_blocks_end() -> None:
    """A block that is opened is closed: an open one takes in the rest of its page."""
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        fences = re.findall(r"^ *```", document.read_text(), re.MULTILINE)
        assert len(fences) % 2 == 0, f"a code block of {document.relative_to(ROOT)} is open"


def test_links_lead_somewhere() -> None:
    """A link to a file, or to a heading in it, has a target."""
    for document in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
            if ":" in target:
                continue
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            assert file.exists(), f"{document.relative_to(ROOT)} links to {target}"
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file), f"{document.relative_to(ROOT)} links to {target}"


def anchors(file: Path) -> set[str]:
    """The names that GitHub and the manual give to a file's headings."""
    headings = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower().replace("`", "")).replace(" ", "-")
        for heading in headings
    }
