"""`memlane stuck` beside an engine that has its own ring: its real queue class between processes.

`make test` takes vLLM 0.33; `make engines` all that MEMLANE_STUCK_IN names, and a real vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.engines import environment

from memlane._base.processes import holders_in
from memlane.inspect.stacks import NoStack, stack
from tests.engines import sources
from tests.engines.running import ROOT
from tests.support import PATIENCE

RELEASES = os.environ.get("MEMLANE_STUCK_IN", "0.33").split()
MEMLANE = [sys.executable, "-m", "memlane", "stuck"]
of_releases = pytest.mark.parametrize("release", RELEASES)


def engine(release: str, name: str) -> AbstractContextManager[list[int]]:
    """Its queues between processes that are called as its own."""
    sources.engine(release)
    command = [sys.executable, "-m", "tests.engines.scenario", release, "stuck_scenarios", name]
    return started(command, VLLM_HOST_IP="127.0.0.1")


def real_vllm(name: str) -> AbstractContextManager[list[int]]:
    if not (environment.HERE / "venv/vllm-0.32.0").exists():
        pytest.skip("`make engines` installs a real vLLM")
    script = str(ROOT / "tests/engines/real_vllm.py")
    command = [str(environment.PYTHON), script, str(environment.MODEL), name]
    return started(command, **environment.VARIABLES)


@contextmanager
def started(command: list[str], **variables: str) -> Iterator[list[int]]:
    """The pids of an engine's core and its workers."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "MEMLANE_"))}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**clean, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    left: set[str] = set()
    try:
        assert process.stdout is not None
        seen = []
        for line in process.stdout:
            seen.append(line)
            if line.startswith("pids: "):
                pids = [int(pid) for pid in line.split()[1:]]
                left = {path for path, holder in holders_in("/dev/shm") if holder.pid in pids}
                yield pids
                break
        else:
            pytest.fail("".join(seen))
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        for path in left:
            Path(path).unlink(missing_ok=True)


def look(core: int, code: int) -> tuple[list[dict[str, Any]], float]:
    """What it has found, and the seconds that it took. The engine needs a moment to get there."""
    until = time.monotonic() + PATIENCE
    while True:
        start = time.monotonic()
        done = subprocess.run(
            [*MEMLANE, str(core), "--json"],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        took = time.monotonic() - start
        assert not done.stderr
        if done.returncode == code or start > until:
            assert done.returncode == code, done
            return json.loads(done.stdout)["stuck"], took


def needs_stacks(pid: int) -> None:
    seen = stack(pid)
    if isinstance(seen, NoStack):
        pytest.skip(seen.reason)


@of_releases
@pytest.mark.parametrize("name", ["stopped", "killed", "computing"])
def test_a_full_ring(release: str, name: str) -> None:
    """The second worker has not read."""
    with engine(release, name) as (core, _, second):
        (wait,), _ = look(core, 1)
        (who,) = wait["awaited"]
        assert (wait["reason"], wait["waiter"]["pid"]) == ("no free chunk", core)
        if name == "killed":
            assert (who["reader"], who["pid"], who["state"]) == (1, None, "dead")
            return
        state = {"stopped": "stopped", "computing": "running"}[name]
        assert (who["reader"], who["pid"], who["state"]) == (1, second, state)
        needs_stacks(second)
        innermost = {"stopped": "worker_busy_loop", "computing": "forward"}[name]
        assert any(frame.startswith(innermost) for frame in who["frames"]), who


@of_releases
@pytest.mark.parametrize("name", ["hung", "asked_while_stopped"])
def test_an_answer_that_does_not_come(release: str, name: str) -> None:
    """The flags of a hung worker's engine look like those of an idle one."""
    with engine(release, name) as (core, _, second):
        needs_stacks(core)
        (wait,), _ = look(core, 1)
        (who,) = wait["awaited"]
        assert (wait["reason"], wait["waiter"]["pid"]) == ("no answer", core)
        assert (who["reader"], who["pid"]) == (1, second)
        assert (who["state"] == "stopped") == (name == "asked_while_stopped")
        if name == "hung":
            assert who["frames"][0].startswith("hang ")


@of_releases
def test_an_idle_engine(release: str) -> None:
    """Its workers wait for the next step."""
    with engine(release, "idle") as (core, *_):
        assert look(core, 0)[0] == []


@pytest.mark.parametrize("name", ["stopped", "hung"])
def test_a_worker_of_a_real_vllm(name: str) -> None:
    """Its worker 0 waits for worker 1 in a collective, so both are named, who is stopped first."""
    with real_vllm(name) as (core, _, second):
        needs_stacks(core)
        (wait,), took = look(core, 1)
        assert (wait["reason"], wait["waiter"]["pid"]) == ("no answer", core)
        culprit = next(who for who in wait["awaited"] if who["pid"] == second)
        assert (culprit["reader"], culprit["title"]) == (1, "VLLM::Worker_TP1")
        if name == "stopped":
            assert wait["awaited"][0] == culprit
            assert culprit["state"] == "stopped"
        else:
            assert any(frame.startswith("hang_in_model ") for frame in culprit["frames"])
        assert took < 1.0 + 2.0


def test_a_killed_worker_of_a_real_vllm() -> None:
    """vLLM notices, and ends by itself; while it does, nothing false is said."""
    with real_vllm("killed") as (core, first, second):
        done = subprocess.run([*MEMLANE, "--json"], capture_output=True, text=True, check=False)
        assert not done.stderr
        found = json.loads(done.stdout)["stuck"]
        blamed = {who["pid"] for wait in found for who in wait["awaited"]}
        assert blamed <= {core, first, None}, second
