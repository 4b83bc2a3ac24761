"""Names and titles that others chose: no output breaks on them, and no terminal obeys them."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from memlane._base.printable import printable
from tests.support import PATIENCE
from tests.support.exporters import exporter
from tests.support.queues import SHM

NAMES = {
    "bytes that are no UTF-8": (b"\xff\xfe", "\\xff\\xfe"),
    "codes of a terminal": (b"\x1b]0;title\x07\x1b[2J", "\\x1b]0;title\\x07\\x1b[2J"),
    "a line of its own": (b"a\nmemlane-b  queue", "a\\nmemlane-b  queue"),
    "rich's markup": (b"[bold]", "[bold]"),
    "text from right to left": ("\u202egnp".encode(), "\\u202egnp"),
}


@pytest.fixture(params=NAMES)
def named(request: pytest.FixtureRequest) -> Iterator[tuple[bytes, str]]:
    """The end of a name, and how it is shown; files of this user, a segment's and an engine's."""
    end, shown = NAMES[request.param]
    paths = [os.fsencode(SHM) + b"/" + start + end for start in (b"memlane-", b"psm_")]
    for path in paths:
        with open(path, "wb") as file:
            file.write(b"x")
    yield end, shown
    for path in paths:
        os.unlink(path)


def run(*arguments: str) -> str:
    """Returns what the command prints; its output takes UTF-8 only."""
    done = subprocess.run(
        [sys.executable, "-m", "memlane", *arguments],
        env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"},
        capture_output=True,
        timeout=PATIENCE,
    )
    assert (done.returncode, done.stderr) == (0, b""), done
    return done.stdout.decode()


@pytest.mark.parametrize("command", [["ls"], ["clean"], ["clean", "--foreign"]])
def test_a_name_stays_on_its_line(command: list[str], named: tuple[bytes, str]) -> None:
    text = run(*command)
    assert f"{'psm_' if '--foreign' in command else 'memlane-'}{named[1]}" in text
    assert "\x1b" not in text
    assert not [line for line in text.splitlines() if line.startswith("memlane-b")]


@pytest.mark.parametrize("command", [["ls", "--json"], ["clean", "--foreign", "--json"]])
def test_json_has_the_same_text(command: list[str], named: tuple[bytes, str]) -> None:
    text = run(*command)
    assert text.isascii()
    assert named[1] in str(json.loads(text)).replace("\\\\", "\\")
    assert "\\ud" not in text


def test_metrics_and_the_page_have_the_same_text(named: tuple[bytes, str]) -> None:
    with exporter() as served:
        assert "\x1b" not in served.metrics()
        text = served.get("/json")[1]
        names = [segment["name"] for segment in json.loads(text)["segments"]]
        assert f"memlane-{named[1]}" in names
        assert text.isascii()
        assert "\\ud" not in text


def test_printable_text_stays_as_it_is() -> None:
    assert printable("memlane-ä 日本 [bold]") == "memlane-ä 日本 [bold]"
    assert printable("a\tb\x7f\x9b\udcff") == "a\\tb\\x7f\\x9b\\xff"


def test_a_title_of_a_process_is_text_of_others() -> None:
    path = SHM / f"memlane-held-{os.getpid()}"
    with path.open("wb") as file:
        command = ["\x1b[2J", str(PATIENCE)]
        holder = subprocess.Popen(
            command, executable=shutil.which("sleep"), pass_fds=[file.fileno()]
        )
    try:
        text = run("ls")
        assert f"{holder.pid} \\x1b[2J" in text
        assert "\x1b" not in text
    finally:
        holder.kill()
        holder.wait()
        path.unlink()
