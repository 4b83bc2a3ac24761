"""The demo and the documents' examples where /dev/shm is small, missing, full or read-only."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.demo import RUN, complaints, environment
from tests.support import unshare_refusal
from tests.support.documents import EXAMPLES, ROOT

# The first word is an empty folder, all others the command.
PLACES = {
    "64 MiB": "mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm",
    "missing": (
        'mount -t tmpfs tmpfs "$1" && for one in null zero full random urandom tty; do '
        '>"$1/$one" && mount --bind "/dev/$one" "$1/$one" || exit 99; done && '
        'ln -s /proc/self/fd "$1/fd" && mount --rbind "$1" /dev'
    ),
    "full": (
        "mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm && "
        "fallocate -l $((64 << 20)) /dev/shm/filler"
    ),
    "read-only": "mount -t tmpfs -o ro tmpfs /dev/shm",
}

pytestmark = [
    pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal()),
]
places = pytest.mark.parametrize("place", PLACES)


def run(place: str, folder: Path, *command: object) -> "subprocess.CompletedProcess[str]":
    """Runs the command in a namespace with that /dev/shm and without a terminal."""
    empty = folder / "dev"
    empty.mkdir()
    script = f'{{ {PLACES[place]}; }} || exit 99; shift; exec "$@"'
    return subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, "sh", empty, *map(str, command)],
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=RUN,
        check=False,
    )


@places
def test_the_demo_works_or_names_the_fault_of_shm(place: str, tmp_path: Path) -> None:
    """It works, or says in one line what is wrong with /dev/shm."""
    done = run(place, tmp_path, sys.executable, "-m", "engine", "--plain")
    if place == "64 MiB":
        assert done.returncode == 0, done.stderr
        return
    assert done.returncode == 1, done.stderr
    (line,) = complaints(done.stderr)
    assert "/dev/shm" in line


@places
@pytest.mark.parametrize("text", EXAMPLES.values(), ids=EXAMPLES)
def test_an_example_works_or_names_the_fault_of_shm(place: str, text: str, tmp_path: Path) -> None:
    """It works, or raises an error of memlane's that says what is wrong with /dev/shm."""
    script = tmp_path / "example.py"
    script.write_text(text)
    done = run(place, tmp_path, sys.executable, script)
    # Not for readers on other hosts alone, nor in a program without memlane.
    needs_shm = "from memlane" in text and "connect_ip" not in text
    assert done.returncode == (1 if needs_shm and place != "64 MiB" else 0), done.stderr
    if done.returncode:
        assert re.search(r"^memlane\.errors\.\w+: .*/dev/shm", done.stderr, re.MULTILINE)
