"""The demo on two hosts, run for real."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.examples.demo import (
    PROMPTS,
    RUN,
    complaints,
    environment,
    terminal,
    without_codes,
    write_prompts,
)
from tests.support import assert_in_time, unshare_refusal


def run(*arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "engine.hosts", *arguments]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=RUN)


@pytest.mark.slow
@pytest.mark.hosts
def test_two_hosts_generate_equal_tokens(tmp_path: Path) -> None:
    """Equal tokens, also over a pause; behind the bound everybody says who is gone, and goes."""
    finished = run("--tokens", "6", "--prompts", write_prompts(tmp_path, PROMPTS))
    said = finished.stdout
    assert finished.returncode == 0, said + finished.stderr
    assert "Traceback" not in finished.stderr  # but a slow start may be remarked upon
    scheduler = re.search(r"scheduler +pid (\d+), on host 1", said)
    workers = dict(re.findall(r"(\d) \(pid (\d+)\)[,: ]", said.partition("cable")[0]))
    assert scheduler is not None
    assert list(workers) == ["1", "2", "3", "4"]
    assert said.count("single process      the same tokens\n") == 2
    assert re.search(r"recovered +one step took [1-9]", said)
    # Both sides have the same bound: a worker may have left before the scheduler gives it up.
    gone = r"worker ([34]) \(pid (\d+)\) died: (?:WriterDied|it left with exit code 1|the writer )"
    named = re.search(rf"raises +after (\d+\.\d) s: {gone}", said)
    assert named, said
    assert float(named[1]) >= 3.0
    assert named[3] == workers[named[2]]
    relay = re.search(r"ReaderDied +reader ([34]) \(pid (\d+)\) died at 198\.18\.\d+\.2:", said)
    assert relay, said
    assert relay[2] == workers[relay[1]]
    for rank in "34":
        whom = rf"the writer \(pid {scheduler[1]}\) died at tcp://198\.18\."
        assert re.search(rf"worker {rank} says +worker {rank} leaves: {whom}", said)
    assert "left by themselves, with exit codes [0, 0, 1, 1]" in said
    assert "nothing left of 3 segments" in said
    assert re.search(r"/dev/shm of host 2 +empty\n +host 2 +gone, with its cable\n$", said)
    for pid in (scheduler[1], *workers.values()):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.hosts
def test_worker_that_dies_while_another_is_stopped_is_named_at_once(tmp_path: Path) -> None:
    prompts = write_prompts(tmp_path, PROMPTS * 15)
    with terminal("--prompts", prompts, module="engine.hosts") as screen:
        screen.until_shown("undisturbed")
        pids = dict(re.findall(r"(\d) \(pid (\d+)\)[,: ]", screen.shown))
        os.kill(int(pids["1"]), signal.SIGSTOP)
        os.kill(int(pids["3"]), signal.SIGKILL)
        killed = time.monotonic()
        screen.until_shown(r"engine: |worker 3")
        assert_in_time(1.0, killed)
        assert screen.until_end() == 1
    assert f"engine: worker 3 (pid {pids['3']}) died: killed by SIGKILL" in screen.shown


@pytest.mark.hosts
@pytest.mark.parametrize("when", ["host 1", "undisturbed"])
def test_interrupt_ends_both_hosts_quietly(when: str, tmp_path: Path) -> None:
    """The conftest sees processes left on host 2, and segments left in /dev/shm."""
    prompts = write_prompts(tmp_path, PROMPTS * 15)
    with terminal("--prompts", prompts, module="engine.hosts") as screen:
        screen.until_shown(when)
        screen.type(b"\x03")
        assert screen.until_end() == 130
    assert "Traceback" not in screen.shown
    said = complaints(without_codes(screen.shown))
    assert not any(line.startswith("engine: ") for line in said)


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_who_is_not_root_is_told() -> None:
    finished = run(before=("unshare", "--user"))
    assert (finished.returncode, finished.stdout) == (1, "")
    (line,) = finished.stderr.splitlines()
    assert line == "engine: no two hosts on this machine: only root can make network namespaces"
