"""The demo ends in order when interrupted: by signals, by deaths, by arguments it refuses."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlane import MessageQueue
from tests.examples.demo import (
    PROMPTS,
    RUN,
    Terminal,
    command,
    complaints,
    default_signals,
    environment,
    terminal,
    without_codes,
    write_prompts,
)
from tests.support import (
    assert_in_time,
    children_of,
    own_pid_namespace,
    private_shm,
    python_needs_no_folder,
    unshare_refusal,
    until,
)

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
NAMES = [ending.name for ending in ENDING]
BLOCKED = ("env", f"--block-signal={','.join(NAMES)}")
PROMISED_SECONDS = 1.0


@pytest.fixture
def few(tmp_path: Path) -> str:
    return write_prompts(tmp_path, PROMPTS)


@pytest.fixture
def many(tmp_path: Path) -> str:
    """Prompts that take minutes."""
    return write_prompts(tmp_path, PROMPTS * 1000)


@pytest.fixture
def stopped(many: str) -> Iterator[Terminal]:
    """A demo in the middle of its work, with worker 0 of three stopped."""
    env = environment(MEMLANE_RINGBUFFER_WARNING_INTERVAL="0.5")
    with terminal("--workers", "3", "--prompts", many, env=env, size=(200, 40)) as screen:
        screen.until_shown(r"\d\d+ messages")
        os.kill(screen.pids[0], signal.SIGSTOP)
        until_state(screen.pids[0], "T")
        yield screen


def until_state(pid: int, state: str) -> None:
    stat = Path(f"/proc/{pid}/stat")
    until(lambda: stat.read_text().rpartition(") ")[2][0] == state)


def signals_of(pid: int, mask: str) -> set[int]:
    """Returns a process's signals: those it catches (SigCgt), ignores (SigIgn), or blocks
    (SigBlk)."""
    found = re.search(rf"{mask}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return {number for number in signal.valid_signals() if int(found[1], 16) >> (number - 1) & 1}


def under(what: str, *arguments: str) -> list[str]:
    """The demo from a shell that does that before."""
    return ["sh", "-c", f'{what}; exec "$@"', "sh", *command(*arguments)]


@pytest.mark.parametrize("ending", ENDING, ids=NAMES)
def test_signal_before_the_first_line_ends_it_when_all_can_be_closed(
    ending: signal.Signals, few: str
) -> None:
    """The signal waits while the demo is imported; there is not even a traceback."""
    process = subprocess.Popen(
        [*BLOCKED, *command("--prompts", few)],
        env=environment(),
        preexec_fn=default_signals,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: ending in signals_of(process.pid, "SigBlk"))
    process.send_signal(ending)
    shown, said = process.communicate(timeout=RUN)
    assert (process.returncode, shown, complaints(said)) == (128 + ending, "", [])


def has_an_interpreter(pid: int) -> bool:
    """Returns whether the process has an interpreter that imports by now. The tracker of
    multiprocessing, which is one, ignores SIGINT soon."""
    return any(signal.SIGINT in signals_of(pid, which) for which in ("SigCgt", "SigIgn"))


@pytest.mark.parametrize("ending", ENDING, ids=NAMES)
def test_signals_while_workers_start_leave_nothing(ending: signal.Signals, few: str) -> None:
    """Ten signals to all processes: the workers' imports are not interrupted, nothing is left."""
    with terminal("--workers", "3", "--prompts", few) as screen:
        until(lambda: len(children_of(screen.process.pid)) == 4)
        for pid in children_of(screen.process.pid):
            until(lambda pid=pid: has_an_interpreter(pid))  # type: ignore[misc]
        for _ in range(10):
            os.killpg(screen.process.pid, ending)
        assert screen.until_end() == 128 + ending
    assert complaints(screen.shown) == []


@pytest.mark.parametrize("ending", ENDING, ids=NAMES)
def test_signal_on_a_terminal_shows_the_cursor_again(ending: signal.Signals, many: str) -> None:
    keys = {signal.SIGINT: b"\x03", signal.SIGQUIT: b"\x1c"}
    with terminal("--workers", "2", "--prompts", many) as screen:
        screen.until_shown("─ memlane engine ─")
        assert screen.is_cursor_hidden
        if ending in keys:
            screen.type(keys[ending])
        else:
            os.killpg(screen.process.pid, ending)
        assert screen.until_end() == 128 + ending
    assert not screen.is_cursor_hidden
    said = complaints(without_codes(screen.shown))
    assert not any(line.startswith("engine: ") for line in said)
    assert "Traceback" not in screen.shown


def test_terminal_that_is_gone_ends_it(many: str) -> None:
    with terminal("--workers", "2", "--prompts", many) as screen:
        screen.until_shown("─ memlane engine ─")
        screen.hang_up()
        assert screen.process.wait(RUN) == 128 + signal.SIGHUP


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
@pytest.mark.parametrize("ending", ENDING, ids=NAMES)
def test_first_process_of_a_container_ends_on_a_signal(ending: signal.Signals, many: str) -> None:
    process = subprocess.Popen(
        [*own_pid_namespace(), *command("--workers", "2", "--prompts", many)[1:]],
        env=environment(),
        preexec_fn=default_signals,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        (first,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(first), ending)
        _, said = process.communicate(timeout=RUN)
    assert (process.returncode, complaints(said)) == (128 + ending, [])


def test_ignored_signals_stay_ignored(few: str) -> None:
    """As with `nohup`."""
    process = subprocess.Popen(
        under('trap "" HUP', "--workers", "1", "--tokens", "40", "--prompts", few),
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        output, _ = process.communicate(timeout=RUN)
    assert process.returncode == 0
    assert "same tokens" in output


def test_interrupt_with_a_stopped_worker_says_so_and_waits_for_nobody(stopped: Terminal) -> None:
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.until_end() == 130
    line = f"engine: worker 0 (pid {stopped.pids[0]}) is stopped: killed"
    assert complaints(without_codes(stopped.shown))[-1] == line


def test_worker_that_dies_while_another_is_stopped_is_named_at_once(stopped: Terminal) -> None:
    pids = stopped.pids
    stopped.until_shown(
        rf"the scheduler \(pid {stopped.process.pid}[^)]*\) .*"
        rf"worker 0 \(pid {pids[0]}[^,)]*, stopped, "
    )
    os.kill(pids[2], signal.SIGKILL)
    killed = time.monotonic()
    stopped.until_shown(rf"worker 0 \(pid {pids[0]}\) is stopped: killed")
    assert_in_time(PROMISED_SECONDS, killed)
    assert stopped.until_end() == 1
    line = f"engine: worker 2 (pid {pids[2]}) died: killed by SIGKILL"
    assert without_codes(stopped.shown).splitlines()[-1] == line


def test_worker_that_is_killed_as_soon_as_it_is_ready_leaves_nothing(many: str) -> None:
    """It is stopped before, so it can no longer remove its queue's name itself."""
    with terminal("--workers", "3", "--prompts", many, "--plain") as screen:
        screen.until_shown(r"ready \(.*\)")
        for deed in (signal.SIGSTOP, signal.SIGKILL):
            os.kill(screen.pids[1], deed)
        assert screen.until_end() == 1
    assert f"engine: worker 1 (pid {screen.pids[1]}) died: killed by SIGKILL" in screen.shown


def test_worker_may_be_ended_by_a_signal_of_its_own(many: str) -> None:
    with terminal("--workers", "2", "--prompts", many) as screen:
        screen.until_shown("─ memlane engine ─")
        os.kill(screen.pids[1], signal.SIGTERM)
        assert screen.until_end() == 1
    line = f"engine: worker 1 (pid {screen.pids[1]}) died: killed by SIGTERM"
    assert without_codes(screen.shown).splitlines()[-1] == line


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_worker_without_shared_memory_says_so_through_the_scheduler(few: str) -> None:
    """There is enough for the store, and for none of the workers."""
    finished = subprocess.run(
        [
            *private_shm("5m"),
            *command(*("--workers", "3", "--store-mib", "3", "--no-offload", "--prompts", few))[1:],
        ],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN,
    )
    assert finished.returncode == 1
    assert "Traceback" not in finished.stderr  # but a slow start may be remarked upon
    line = finished.stderr.splitlines()[-1]
    assert re.match(r"engine: worker \d \(pid \d+\) died: ShmExhausted: need \d+ bytes", line)


SCHEDULER_WITHOUT_LUCK = """
from multiprocessing.connection import wait

from engine.crew import WorkerDied
from engine.image_store import ImageWriter
from engine.local import LocalCrew
from engine.model import ModelConfig
from engine.paging import Pools


class UnluckyCrew(LocalCrew):
    def _assignment(self, rank, broadcast):
        assignment = super()._assignment(rank, broadcast)
        return assignment._replace(images=gone) if rank == 2 else assignment

    def _start(self, assignments):
        super()._start(assignments[::2])
        for rank in (2, 0):
            wait([self.workers[rank].sentinel])
        super()._start([assignments[1]])


store = ImageWriter(4 << 20, 3)
gone = store.handle()
store.close()
try:
    UnluckyCrew(ModelConfig(), 3, Pools(16, 0), store_bytes=4 << 20)
except WorkerDied as error:
    print(error)
"""


def test_first_death_is_told_when_others_left_because_of_it() -> None:
    """Worker 0 has seen the death of worker 2, and has left, before the scheduler attaches."""
    finished = subprocess.run(
        [sys.executable, "-c", SCHEDULER_WITHOUT_LUCK],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN,
    )
    assert complaints(finished.stderr) == []
    assert re.match(r"worker 2 \(pid \d+\) died: SegmentMissing: ", finished.stdout)


@pytest.mark.parametrize("files", [12, 18])
def test_too_few_files_are_one_clear_error(files: int, few: str) -> None:
    """In multiprocessing's own process, or in a worker."""
    finished = subprocess.run(
        under(f"ulimit -n {files}", "--workers", "4", "--no-offload", "--prompts", few),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN,
    )
    assert finished.returncode == 1
    *_, last = finished.stderr.splitlines()
    assert re.match(rf"engine: cannot start worker \d: Too many .*\(ulimit -n, now {files}\)", last)
    assert "Traceback" not in finished.stderr


@python_needs_no_folder
def test_working_directory_that_is_gone_is_one_clear_error(few: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    finished = subprocess.run(
        under(f"cd '{gone}' && rmdir '{gone}'", "--workers", "1", "--prompts", few),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=RUN,
    )
    assert finished.returncode == 1
    (line,) = complaints(finished.stderr)
    assert line.startswith("engine: cannot start worker 0: ")
    assert "working directory" in line


def test_killed_scheduler_leaves_nobody_while_workers_start(few: str) -> None:
    """Nor a segment, as soon as another one is created."""
    with terminal("--workers", "3", "--prompts", few) as screen:
        screen.process.kill()
        screen.until_end()
    MessageQueue(1, 1).close()
