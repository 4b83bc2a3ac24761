"""The command line as a person, a pipe or a probe runs it: real processes, a real terminal.

``MEMLANE_SOAK_BENCH`` is the number of turns that `memlane bench` gives each queue (default 1).
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import memlane
from memlane import MessageQueue, ShmRingBuffer
from memlane._base.processes import name_of
from memlane.engines.vllm import _folder
from memlane.offload import _start
from memlane.offload._holding import Holding
from tests.examples.demo import terminal, without_codes
from tests.support import PATIENCE, Link, run_memlane, start, until
from tests.support.missing import package
from tests.support.queues import (
    fill,
    name_in,
    path_of,
    queue_of,
    segments,
    start_reader,
    start_writer,
    sweep,
)
from tests.support.regions import new_id, region_of
from tests.support.regions import path_of as region_path

MEMLANE = [sys.executable, "-m", "memlane"]
TURNS = os.environ.get("MEMLANE_SOAK_BENCH", "1")
BENCH = f"""
from memlane.__main__ import main
from memlane.cli.bench import command
command.ROUNDS = {TURNS}
main()
"""


pytestmark = pytest.mark.usefixtures("commands")


def run(
    *arguments: str, command: Sequence[str] = (), **more: str
) -> subprocess.CompletedProcess[str]:
    """In a process that has imported the command line, unless another command is given."""
    if not command:
        return run_memlane(*arguments, **more)
    return subprocess.run(
        [*command, *arguments],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def found(*arguments: str, code: int = 0) -> Any:
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (code, ""), done
    return json.loads(done.stdout)


def without(*modules: str) -> list[str]:
    """`memlane` where these modules are not installed."""
    return [
        sys.executable,
        "-c",
        f"import sys; sys.modules.update(dict.fromkeys({modules!r})); "
        "from memlane.__main__ import main; main()",
    ]


def test_version_prints_the_version() -> None:
    assert run("--version").stdout == f"memlane {memlane.__version__}\n"


def test_ls_shows_a_queue() -> None:
    """One JSON object, in bytes and seconds."""
    with MessageQueue(2, 2, max_chunk_bytes=64, max_chunks=4) as writer:
        reader = start_reader(writer.export_handle(1), 1)
        writer.enqueue(1)
        listed = found("ls")
        assert set(listed) == {"segments", "names", "shm"}
        assert listed["shm"]["total"] >= listed["shm"]["used"] > 0
        (segment,) = [one for one in listed["segments"] if one["name"] == path_of(writer).name]
        assert (segment["kind"], segment["is_leftover"]) == ("queue", False)
        assert [(who["role"], who["rank"], who["pid"]) for who in segment["participants"]] == [
            ("writer", None, os.getpid()),
            ("reader", 0, None),
            ("reader", 1, reader.pid),
        ]
        assert segment["participants"][2]["behind"] == 1
        reader.peer.kill()


@pytest.mark.parametrize("columns", [80, 200])
def test_ls_fits_the_terminal(columns: int) -> None:
    """A row for each segment, and no line is broken."""
    with (
        queue_of(3) as (writer, _),
        terminal("ls", module="memlane", size=(columns, 40)) as screen,
    ):
        assert screen.until_end() == 0
        lines = without_codes(screen.shown).splitlines()
        assert max(map(len, lines)) <= columns
        (row,) = [line for line in lines if name_in(writer.handle)[8:14] in line]
        assert "queue" in row
        assert "3/3" in row


def test_ls_is_plain_when_piped() -> None:
    """No colours, no codes, no frames that a script must skip."""
    with queue_of(1) as (writer, _):
        done = run("ls")
        assert "\x1b" not in done.stdout
        assert name_in(writer.handle)[8:16] in done.stdout


def test_arguments_of_a_process_are_never_shown() -> None:
    """Keys stand there."""
    script = "import memlane, sys; q = memlane.MessageQueue(1, 1); print(1, flush=True); input()"
    command = [sys.executable, "-c", script, "--api-key=s3cr3t"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "1\n"
        done = run("ls")
        assert f"{other.pid} python" in done.stdout
        assert "s3cr3t" not in done.stdout
        other.communicate("")


def test_top_ends_with_q() -> None:
    """And leaves the terminal as it was."""
    with (
        queue_of(1) as (writer, _),
        terminal("top", "--interval", "0.2", module="memlane") as screen,
    ):
        screen.until_shown(name_in(writer.handle)[8:14])
        screen.type(b"s")
        screen.until_shown("by rate")
        screen.type(b"q")
        assert screen.until_end() == 0
        assert not screen.is_cursor_hidden


def test_top_leaves_the_terminal_as_it_was_on_sigterm() -> None:
    with (
        queue_of(1) as (writer, _),
        terminal("top", "--interval", "0.2", module="memlane") as screen,
    ):
        screen.until_shown(name_in(writer.handle)[8:14])
        screen.process.terminate()
        assert screen.until_end() == 143
        assert not screen.is_cursor_hidden


def test_top_shows_what_a_name_contains() -> None:
    with (
        queue_of(1) as (writer, _),
        queue_of(1) as (other, _),
        terminal("top", "--interval", "0.2", module="memlane") as screen,
    ):
        wanted, rest = (name_in(each.handle)[8:14] for each in (writer, other))
        screen.until_shown(rest)
        screen.type(b"/" + wanted.encode() + b"q\x7f")
        screen.until_shown(f"name: {wanted}_")
        frame = screen.until_shown(f"(?s)SEGMENT.*name: {wanted}_")
        assert f"memlane-{wanted}" in frame
        assert rest not in frame
        screen.type(b"\x1b")
        screen.until_shown(rest)
        screen.type(b"q")
        assert screen.until_end() == 0


@pytest.mark.parametrize("is_piped", [True, False])
def test_top_prints_plain_lines_into_a_pipe_and_on_a_dumb_terminal(is_piped: bool) -> None:
    """One look below the other; once nobody reads the pipe, it ends as other programs do."""
    with queue_of(1) as (writer, _):
        name = name_in(writer.handle)[8:14]
        if not is_piped:
            command = ("top", "--interval", "0.2")
            with terminal(*command, module="memlane", term="dumb") as screen:
                screen.until_shown(f"(?s){name}.*{name}")
                assert "\x1b" not in screen.shown
                screen.type(b"\x03")
                assert screen.until_end() in (0, 130)
            return
        top = [*MEMLANE, "top", "--interval", "0.2"]
        with subprocess.Popen(top, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert b"/dev/shm: " in lines[0]
            assert lines[1].startswith(b"SEGMENT")
            process.stdout.close()
            assert process.wait(PATIENCE) == -signal.SIGPIPE


def test_top_shows_what_is_wrong_first_and_scrolls() -> None:
    """At 80 columns and a few lines."""
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(queue_of(1))
        late = stack.enter_context(MessageQueue(1, 1, name="zzz-late"))
        size = ("top", "--interval", "0.2")
        with terminal(*size, module="memlane", size=(80, 8)) as screen:
            shown = screen.until_shown(r"(?s)SEGMENT +STATE.*?q quit")
            lines = [line for line in without_codes(shown).splitlines() if "queue" in line]
            assert re.match("zzz-late +attaching", lines[0])
            assert max(map(len, lines)) <= 80
            screen.until_shown("1-5 of 9")
            screen.type(b"\x1b[B")
            screen.until_shown("2-6 of 9")
            screen.type(b"\x1b[6~")
            screen.until_shown("5-9 of 9")
            screen.type(b"q")
            assert screen.until_end() == 0
        late.close()


def test_trace_into_a_pipe_that_nobody_reads_ends_as_other_programs_do() -> None:
    with queue_of(1):
        reads, writes = os.pipe()
        os.close(reads)
        command = [*MEMLANE, "trace", str(os.getpid()), "--seconds", "0.01", "-o"]
        done = subprocess.run(
            [*command, f"/dev/fd/{writes}"],
            pass_fds=[writes],
            capture_output=True,
            timeout=PATIENCE,
        )
        os.close(writes)
        assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_clean_shows_first_and_removes_with_yes() -> None:
    """It removes what a killed process left; a living one's stays."""
    writer = start_writer()
    alive = ShmRingBuffer(1, 64, 1)
    left, kept = name_in(writer.greeting), path_of(alive).name
    writer.peer.kill()
    try:
        assert left in [one["name"] for one in found("clean")["leftovers"]]
        assert left in segments()
        assert left in found("clean", "--yes")["removed"]
        assert left not in segments()
        assert kept in segments()
    finally:
        alive.close()


@pytest.mark.parametrize("arguments", [["-h"], ["stuck", "-h"]])
def test_h_is_help(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 0
    assert "Usage: memlane" in done.stdout


@pytest.mark.parametrize("arguments", [["ls", "--what"], ["stuck", "--after", "soon"], ["fly"]])
def test_bad_input_is_a_line(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_without_the_extra_a_command_names_it() -> None:
    done = subprocess.run(
        [*without("typer"), "ls"], capture_output=True, text=True, timeout=PATIENCE
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install '.[cli]' in memlane's checkout" in done.stderr


def test_bench_measures_peers_in_one_run(tmp_path: Path) -> None:
    """A row for each that is installed, the same in the picture; nothing is left behind."""
    picture = tmp_path / "bench.svg"
    before = segments()
    done = run("bench", "-o", str(picture), command=[sys.executable, "-c", BENCH])
    assert (done.returncode, done.stderr) == (0, ""), done
    rows = {line.split("  ")[0]: re.findall(r"[\d.,]+", line) for line in done.stdout.splitlines()}
    for name in ("memlane", "Pipe", "pyzmq"):
        assert len(rows[name]) == 5, done.stdout
    drawn = picture.read_text().replace("&#160;", " ")
    assert all(figure in drawn for figure in rows["memlane"])
    assert segments() == before


def test_bench_measures_nothing_if_the_picture_cannot_be_written(tmp_path: Path) -> None:
    done = run("bench", "-o", str(tmp_path / "none/bench.svg"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("memlane: cannot write ")


def test_stuck_names_the_stopped_reader() -> None:
    """Rank, pid and state; exit code 1. Nobody is stuck once it runs again."""
    writer = start_writer(1, max_chunks=2)
    reader = start_reader(writer.greeting)
    reader.peer.stop()
    writer.call(fill)
    writer.begin("enqueue", 1, timeout=PATIENCE).until_blocked()
    name = name_in(writer.greeting)

    runs: list[subprocess.CompletedProcess[str]] = []

    def is_named() -> bool:
        runs.append(run("stuck", "--after", "0.2", "--no-stacks"))
        return name[8:18] in runs[-1].stdout

    until(is_named)
    text = runs[-1].stdout
    assert runs[-1].returncode == 1
    assert re.search(rf"reader 0 \(pid {reader.pid} .*, stopped, 2 behind", text)
    assert f"kill -CONT {reader.pid}" in text
    watching = subprocess.Popen(
        [*MEMLANE, "stuck", "--watch", "0.2", "--no-stacks"], stdout=subprocess.PIPE, text=True
    )
    with watching:
        assert watching.stdout is not None
        first = watching.stdout.readline()
        watching.terminate()
        watching.communicate(timeout=PATIENCE)
    assert watching.returncode == 143
    assert re.match(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d writer \(pid {writer.pid} ", first)
    for process in (reader, writer):
        process.peer.kill()
    sweep()


def become(link: Link, user: int) -> None:
    """Role: a process of another user."""
    os.setuid(user)
    link.tell()
    link.hear()


@pytest.mark.root
@pytest.mark.parametrize("command", ["stuck", "trace"])
def test_a_process_of_another_user_is_bad_input(command: str) -> None:
    """Also for root: only a user's own segments are looked at, so nobody would seem stuck."""
    peer = start(become, 65534)
    peer.hear()
    done = run(command, str(peer.pid))
    assert (done.returncode, done.stdout) == (2, "")
    assert f"process {peer.pid} is of user 65534: run this as that user" in done.stderr
    peer.kill()


def region_in_folder(instance: str) -> Holding:
    """As the workers of a vLLM with MEMLANE_VLLM=region have it."""
    folder, size = str(region_path(instance)), 8 * 4096
    part = _start.Part(0, size, 0, 1)
    plan = _start.Plan(folder, f"{folder}/{_folder.FILE}", size, part, part, 1, "4k")
    return _folder.within(folder, lambda: Holding(_folder.FILE, 4, 8192, 4096, plan))


def hold_region(link: Link, instance: str, is_in_folder: bool) -> None:
    """Role: has a region, as a file or in a folder of that name."""
    held = region_in_folder(instance) if is_in_folder else region_of(instance)
    assert held is not None
    link.tell()
    link.hear()


@pytest.mark.parametrize("is_in_folder", [False, True])
def test_clean_knows_regions(is_in_folder: bool) -> None:
    """All that a killed engine takes is shown, and removed; a living one's stays."""
    package("torch")
    instance = new_id()
    holder = start(hold_region, instance, is_in_folder)
    holder.hear()
    path = region_path(instance)
    name = path.name + "/memlane" * is_in_folder
    try:
        assert name not in [one["name"] for one in found("clean", "--yes")["leftovers"]]
        holder.kill()
        (left,) = [one for one in found("clean")["leftovers"] if one["name"] == name]
        assert left["bytes"] >= 4 * 2 * 4096
        assert name in found("clean", "--yes")["removed"]
        assert not path.exists()
    finally:
        shutil.rmtree(path, ignore_errors=True)


def test_clean_takes_a_name() -> None:
    """A file that may be on its way to another process is removed only by its name, and not while
    it is open."""
    path = Path(f"/dev/shm/psm_{os.getpid()}_named")
    path.write_bytes(b"x")
    try:
        seen = found("clean", "--foreign", "--yes")["kept"]
        (kept,) = [one for one in seen if one["name"] == path.name]
        assert "may have made it" in kept["reason"]
        assert path.exists()
        with path.open():
            assert str(os.getpid()) in run("clean", "--foreign", "--yes", path.name).stdout
            assert path.exists()
        assert found("clean", "--foreign", "--yes", str(path))["removed"] == [path.name]
        assert not path.exists()
        done = run("clean", "--foreign", "--yes", path.name)
        assert (done.returncode, done.stdout) == (2, "")
        assert path.name in done.stderr
    finally:
        path.unlink(missing_ok=True)


@pytest.mark.parametrize("command", ["ls", "ls --json", "stuck", "doctor", "clean", "--help"])
def test_a_reader_that_has_gone_ends_a_command_as_it_ends_others(command: str) -> None:
    """By SIGPIPE, which shells show as 141, and without a word: 1 would say that somebody is
    stuck."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [*MEMLANE, *command.split()], stdout=writer, stderr=subprocess.PIPE, timeout=PATIENCE
    )
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (-signal.SIGPIPE, b"")


def test_a_closed_output_changes_no_exit_code() -> None:
    for command in ("ls", "stuck"):
        shell = ["sh", "-c", 'exec "$@" >&-', "sh", *MEMLANE, command]
        assert subprocess.run(shell, capture_output=True, timeout=PATIENCE).returncode == 0


def test_an_output_without_space_is_a_line_and_no_finding() -> None:
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [*MEMLANE, "stuck"], stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE, text=True
        )
    assert ended.returncode == 4
    assert ended.stderr == "memlane: cannot write the output: No space left on device\n"


def test_a_process_that_multiprocessing_started_has_the_name_of_its_parent() -> None:
    program = Path(__file__).with_name("spawning.py")
    with subprocess.Popen(
        [sys.executable, str(program)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        own = name_of(parent.pid)
        assert own.endswith("spawning.py")
        assert [name_of(pid) for pid in pids] == [f"{own}: spawned"] * 2
        parent.communicate()
