"""The demo's live view: on a terminal it shows what each worker does; elsewhere it is off."""

import os
import re
import signal
from pathlib import Path

import pytest

from tests.examples.demo import (
    HIDE_CURSOR,
    PROMPTS,
    SHOW_CURSOR,
    environment,
    run,
    terminal,
    without_codes,
    write_prompts,
)

ESCAPE = "\x1b"
TITLE = "─ memlane engine ─"


@pytest.fixture
def few(tmp_path: Path) -> str:
    return write_prompts(tmp_path, PROMPTS)


@pytest.fixture
def many(tmp_path: Path) -> str:
    """Prompts that take minutes."""
    return write_prompts(tmp_path, PROMPTS * 1000)


def rows(shown: str) -> dict[int, str]:
    """The workers' rows in the last picture, by pid, without codes."""
    picture = without_codes(shown.rpartition(TITLE)[2])
    return {int(row[2]): row[0] for row in re.finditer(r"│ +(\d+) +(\d+)  .*│", picture)}


def test_terminal_gets_a_live_view_and_the_summary(few: str) -> None:
    with terminal("--workers", "2", "--tokens", "8", "--prompts", few) as screen:
        assert screen.until_end() == 0, screen.shown
    assert HIDE_CURSOR in screen.shown
    view, _, summary = screen.shown.rpartition(SHOW_CURSOR)
    assert "4 finished, 0 running, 0 paused, 0 waiting, 0 to come" in view.rpartition(TITLE)[2]
    workers = rows(view)
    assert list(workers) == screen.pids
    for row in workers.values():
        assert re.search(r"running +0 +\d+\.\d s ago", row)
    for measure in (
        r"step .*p50 [\d.]+ ms, p99",
        r"one way .*p50 \d+ us, p99",
        r"per second .*\d+",
        r"images .*4 stored, 4.7\d MB; 4 puts, 0 hits, 0 evictions",
    ):
        assert re.search(measure, view.rpartition(TITLE)[2])
    assert "same tokens" in summary
    assert ESCAPE not in summary


def test_view_goes_on_while_the_scheduler_waits_for_a_stopped_worker(many: str) -> None:
    with terminal("--workers", "2", "--prompts", many) as screen:
        screen.until_shown(TITLE)
        victim = screen.pids[1]
        os.kill(victim, signal.SIGSTOP)
        try:
            screen.until_shown(rf"{victim}.*stopped")
            screen.until_shown(rf"{victim}.*stopped")  # drawn again, while nothing goes on
        finally:
            os.kill(victim, signal.SIGCONT)
        screen.until_shown(rf"{victim}.*running")
        screen.process.send_signal(signal.SIGINT)
        assert screen.until_end() == 130
    assert screen.shown.rpartition(SHOW_CURSOR)[1], "the cursor is still hidden"
    assert "Traceback" not in screen.shown


def test_last_view_shows_who_was_killed(few: str) -> None:
    with terminal("--workers", "3", "--prompts", few, "--kill-worker") as screen:
        assert screen.until_end() == 0, screen.shown
    view = screen.shown.rpartition(SHOW_CURSOR)[0]
    states = [re.split(r" +", row)[3] for row in rows(view).values()]
    assert states == ["running", "dead", "running"]
    assert re.search(rf"kill -9 +worker 1 \(pid {screen.pids[1]}\)", view)
    assert f"worker 1 (pid {screen.pids[1]}) died" in screen.shown


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_terminal_that_is_not_utf8_gets_a_view_of_its_own_characters(
    encoding: str, tmp_path: Path
) -> None:
    folder = tmp_path / "größer"  # which an error names
    folder.mkdir()
    prompts = write_prompts(folder, PROMPTS)
    env = environment(PYTHONIOENCODING=encoding)
    with terminal("--workers", "2", "--tokens", "8", "--prompts", prompts, env=env) as screen:
        assert screen.until_end() == 0, screen.shown
    assert screen.shown.isascii()
    assert not screen.is_cursor_hidden
    view = without_codes(screen.shown.rpartition(SHOW_CURSOR)[0])
    assert re.search(r"\| requests +#{40} ", view)
    assert len(re.findall(r"\| +\d +\d+  running .*\|", view)) >= 2
    assert "same tokens" in screen.shown


@pytest.mark.parametrize("size", [(40, 10), (80, 10), (40, 24), (30, 6)])
def test_small_terminal_shows_every_worker(size: tuple[int, int], few: str) -> None:
    arguments = ("--workers", "3", "--tokens", "8", "--prompts", few)
    with terminal(*arguments, size=size) as screen:
        assert screen.until_end() == 0, screen.shown
    view, _, _ = screen.shown.rpartition(SHOW_CURSOR)
    *_, picture = view.split("╭")
    lines = without_codes("╭" + picture).splitlines()
    assert len(lines) <= size[1]
    assert {len(line) for line in lines} == {size[0]}
    shown = [row[1] for line in lines if (row := re.match(r"│ +\d +(\d+) +running", line))]
    assert shown == [str(pid) for pid in screen.pids]
    assert "requests" in lines[1]


def test_terminal_without_room_shows_who_does_not_run(many: str) -> None:
    with terminal("--workers", "8", "--prompts", many, size=(40, 8)) as screen:
        screen.until_shown("─ memlane engine ─")
        victim = screen.pids[7]
        os.kill(victim, signal.SIGSTOP)
        try:
            screen.until_shown(rf"requests[^╭]*7 +{victim} [^╭]*stopped")
        finally:
            os.kill(victim, signal.SIGCONT)
        screen.type(b"\x03")
        assert screen.until_end() == 130


def test_plain_has_no_control_codes_on_a_terminal(few: str) -> None:
    with terminal("--workers", "1", "--tokens", "4", "--prompts", few, "--plain") as screen:
        assert screen.until_end() == 0, screen.shown
    assert ESCAPE not in screen.shown
    assert TITLE not in screen.shown
    assert "same tokens" in screen.shown


def test_pipe_has_no_control_codes_whatever_the_environment_wants(few: str) -> None:
    arguments = ("--workers", "1", "--tokens", "4", "--prompts", few)
    finished = run(*arguments, FORCE_COLOR="1", TERM="xterm-256color")
    assert finished.returncode == 0, finished.stderr
    assert ESCAPE not in finished.stdout + finished.stderr
    assert TITLE not in finished.stdout


def test_without_rich_it_says_so_once_and_runs(few: str, tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ModuleNotFoundError(\"No module named 'rich'\")\n")
    arguments = ("--workers", "1", "--tokens", "4", "--prompts", few)
    with terminal(*arguments, env=environment(tmp_path)) as screen:
        assert screen.until_end() == 0, screen.shown
    assert len(re.findall(r"live view.*rich", screen.shown)) == 1
    assert ESCAPE not in screen.shown
    assert "same tokens" in screen.shown
