"""`memlane stuck` beside an engine that has its own ring: its real queue class between processes.

`make test` takes vLLM 0.33; `make engines` all that MEMLANE_STUCK_IN names, and a real vLLM.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from benchmarks.engines import environment

from memlane._base.processes import holders_in
from memlane.inspect.stacks import NoStack, stack
from tests.engines import sources
from tests.engines.running import ROOT
from tests.support import PATIENCE, assert_in_time, run_memlane
from tests.support.missing import needs

# With more time for stacks: on a busy machine five seconds may be too short.
PATIENTLY = f"""from memlane.inspect import stacks
stacks.stacks_of.__kwdefaults__["timeout"] = {PATIENCE / 2}
from memlane.__main__ import main
main()"""
pytestmark = pytest.mark.usefixtures("commands")
Found = list[dict[str, Any]]


@contextmanager
def started(command: Sequence[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process with the engine's own environment; it and what it has started is killed."""
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
    try:
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


@contextmanager
def reported(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """The pids of its core and its workers; what they leave in /dev/shm is removed."""
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.startswith("pids: "):
            break
    else:
        pytest.fail("".join(seen))
    pids = [int(pid) for pid in line.split()[1:]]
    left = {path for path, holder in holders_in("/dev/shm") if holder.pid in pids}
    try:
        yield pids
    finally:
        with suppress(ProcessLookupError):
            os.killpg(pids[0], signal.SIGKILL)
        for path in left:
            Path(path).unlink(missing_ok=True)


@contextmanager
def engine(process: subprocess.Popen[str], name: str) -> Iterator[list[int]]:
    """Its queues between processes that are called as its own."""
    assert process.stdin is not None
    print(name, file=process.stdin, flush=True)
    with reported(process) as pids:
        yield pids


@contextmanager
def real_vllm(name: str) -> Iterator[list[int]]:
    if not (environment.HERE / "venv/vllm-0.32.0").exists():
        pytest.skip(needs("a real vLLM"))
    script = str(ROOT / "tests/engines/real_vllm.py")
    command = [str(environment.PYTHON), script, str(environment.MODEL), name]
    with started(command, **environment.VARIABLES) as process, reported(process) as pids:
        yield pids


def look(
    core: int, code: int, key: str = "stuck", *, holds: Callable[[Found], bool] = lambda _: True
) -> tuple[Found, float, float]:
    """Returns what it has found, when it was asked, and when it had answered. The engine needs a
    moment to get there, and to make the calls that a stack is to show."""
    until = time.monotonic() + PATIENCE
    while True:
        start = time.monotonic()
        done = run_memlane("stuck", str(core), "--json", program=PATIENTLY)
        end = time.monotonic()
        assert not done.stderr
        found = json.loads(done.stdout)[key]
        if (done.returncode == code and holds(found)) or start > until:
            assert done.returncode == code, done
            return found, start, end


def has_frame(who: dict[str, Any], name: str) -> bool:
    return any(frame.startswith(name) for frame in who["frames"] or ())


def can_trace(pid: int) -> bool:
    return not isinstance(stack(pid), NoStack)


def full_ring(name: str, core: int, second: int) -> None:
    """The second worker has not read."""
    innermost = {"stopped": "worker_busy_loop", "computing": "forward"}.get(name, "")
    is_traced = name != "killed" and can_trace(second)
    (wait,), *_ = look(
        core, 1, holds=lambda found: not is_traced or has_frame(found[0]["awaited"][0], innermost)
    )
    (who,) = wait["awaited"]
    assert (wait["reason"], wait["waiter"]["pid"]) == ("no free chunk", core)
    if name == "killed":
        assert (who["reader"], who["pid"], who["state"]) == (1, None, "dead")
        return
    state = {"stopped": "stopped", "computing": "running"}[name]
    assert (who["reader"], who["pid"], who["state"]) == (1, second, state)
    assert not is_traced or has_frame(who, innermost), who


def no_answer(name: str, core: int, second: int) -> None:
    """The flags of a hung worker's engine look like those of an idle one."""
    if not can_trace(core):
        return

    def is_there(found: list[dict[str, Any]]) -> bool:
        """A ring that has moved between two looks gives no reader its number."""
        who = found[0]["awaited"][0]
        return name != "hung" or (has_frame(who, "hang ") and who["reader"] is not None)

    (wait,), *_ = look(core, 1, holds=is_there)
    (who,) = wait["awaited"]
    assert (wait["reason"], wait["waiter"]["pid"]) == ("no answer", core)
    assert (who["reader"], who["pid"]) == (1, second)
    assert (who["state"] == "stopped") == (name == "asked_while_stopped")
    if name == "hung":
        assert who["frames"][0].startswith("hang ")


def nobody(name: str, core: int, second: int) -> None:
    """The workers wait for the next step."""
    assert look(core, 0)[0] == [], (name, second)


def nothing_moves(name: str, core: int, second: int) -> None:
    """The core hangs where no ring shows it; its workers wait for the next step."""
    if not can_trace(core):
        return
    hung = {"scheduling": "hang", "sending": "hang_beside"}[name]

    def holds(found: Found) -> bool:
        first, *rest = found[0]["processes"]
        return (
            (first["pid"], first["at_rest"]) == (core, False)
            and second in [who["pid"] for who in rest if who["at_rest"]]
            and any(thread["frames"][0].startswith(f"{hung} ") for thread in first["stack"] or ())
        )

    found, *_ = look(core, 3, "silent", holds=holds)
    assert holds(found), found


CASES = {
    "stopped": full_ring,
    "killed": full_ring,
    "computing": full_ring,
    "hung": no_answer,
    "asked_while_stopped": no_answer,
    "idle": nobody,
    "scheduling": nothing_moves,
    "sending": nothing_moves,
}


@pytest.mark.parametrize("release", os.environ.get("MEMLANE_STUCK_IN", "0.33").split())
def test_the_culprit_is_named(release: str) -> None:
    """One process imports the release's queues, and forks an engine for each case."""
    sources.engine(release)
    scenario = ("tests.engines", release, "stuck_scenarios", "one_after_another")
    with started([sys.executable, "-m", *scenario], VLLM_HOST_IP="127.0.0.1") as process:
        for name, check in CASES.items():
            with engine(process, name) as (core, _, second):
                check(name, core, second)


@pytest.mark.parametrize("name", ["stopped", "hung"])
def test_a_stopped_worker_of_a_real_vllm_is_named_first(name: str) -> None:
    """Its worker 0 waits for worker 1 in a collective, so both are named, who is stopped first."""
    with real_vllm(name) as (core, _, second):
        if not can_trace(core):
            pytest.skip(needs("ptrace"))
        (wait,), start, end = look(core, 1)
        assert (wait["reason"], wait["waiter"]["pid"]) == ("no answer", core)
        culprit = next(who for who in wait["awaited"] if who["pid"] == second)
        assert (culprit["reader"], culprit["title"]) == (1, "VLLM::Worker_TP1")
        if name == "stopped":
            assert wait["awaited"][0] == culprit
            assert culprit["state"] == "stopped"
        else:
            assert any(frame.startswith("hang_in_model ") for frame in culprit["frames"])
        assert_in_time(1.0 + 2.0, start, end)


def test_nothing_false_is_said_of_a_killed_worker_of_a_real_vllm() -> None:
    """vLLM notices, and ends by itself; while it does, nothing false is said."""
    with real_vllm("killed") as (core, first, second):
        done = run_memlane("stuck", "--json", program=PATIENTLY)
        assert not done.stderr
        found = json.loads(done.stdout)["stuck"]
        blamed = {who["pid"] for wait in found for who in wait["awaited"]}
        assert blamed <= {core, first, None}, second
