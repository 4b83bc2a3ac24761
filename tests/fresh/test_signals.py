"""Signals at random moments of the demo, from its first line to its last: nothing is left behind.

MEMLANE_FRESH_SIGNALS is the number of each kind (default 5). The moments are drawn from a seed,
which a failure prints.
"""

import os
import random
import re
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from memlane import MessageQueue
from tests.examples.demo import (
    PROMPTS,
    Terminal,
    complaints,
    terminal,
    without_codes,
    write_prompts,
)
from tests.support import PATIENCE, until

ROUNDS = int(os.environ.get("MEMLANE_FRESH_SIGNALS", "5"))
KEYS = {signal.SIGINT: b"\x03", signal.SIGQUIT: b"\x1c"}
MOST_LINES = 2
EXPECTED = re.compile(r"[│╭╰]|memlane engine: |  \S| *$")
"""Lines of a run that nothing disturbs: the panel, the title, the summary."""


@pytest.fixture
def arguments(tmp_path: Path) -> tuple[str, ...]:
    prompts = write_prompts(tmp_path, PROMPTS)
    return ("--workers", "2", "--tokens", "8", "--images", "2", "--prompts", prompts)


@pytest.fixture
def seconds(arguments: tuple[str, ...]) -> float:
    """The time that it takes undisturbed."""
    with terminal(*arguments) as screen:
        until_first_line(screen)
        started = time.monotonic()
        assert screen.until_end() == 0, screen.shown
        return time.monotonic() - started


@pytest.mark.soak(seconds=60 + 20 * ROUNDS)
@pytest.mark.parametrize(
    "kind",
    [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT],
    ids=lambda kind: kind.name,
)
def test_a_signal_at_any_moment_leaves_nothing(
    kind: signal.Signals, arguments: tuple[str, ...], seconds: float
) -> None:
    for number in range(ROUNDS):
        chance = random.Random(f"{kind.name} {number}")
        delay, repeats, to_all = (
            chance.uniform(0, seconds),
            chance.choice([1, 1, 10]),
            chance.random() < 0.7,
        )
        before = segments()
        with terminal(*arguments) as screen:
            until_first_line(screen)
            watch(screen, delay)
            with suppress(ProcessLookupError):  # it was quicker than the one that was measured
                for _ in range(repeats):
                    send(screen, kind, to_all)
            code = screen.until_end()
            seed = f"{kind.name} {number}, after {delay:.3f} s of {seconds:.3f} s:\n{screen.shown}"
            assert not orphans(screen.process.pid), seed
        assert segments() == before, seed
        assert not screen.is_cursor_hidden, seed
        is_complete = "single process      the same tokens" in screen.shown
        assert code == 128 + kind or (is_complete and code in (0, -kind)), f"{code}: {seed}"
        assert len(remarks(screen.shown)) <= MOST_LINES, seed


@pytest.mark.soak(seconds=60 + 20 * ROUNDS)
def test_a_killed_scheduler_leaves_no_workers(arguments: tuple[str, ...], seconds: float) -> None:
    """Its files in /dev/shm are removed when the next segment is created."""
    for number in range(ROUNDS):
        delay = random.Random(f"SIGKILL {number}").uniform(0, seconds)
        before = segments()
        with terminal(*arguments) as screen:
            until_first_line(screen)
            watch(screen, delay)
            screen.process.kill()
            screen.until_end()
            seed = f"SIGKILL {number}, after {delay:.3f} s of {seconds:.3f} s:\n{screen.shown}"
            assert not orphans(screen.process.pid), seed
        MessageQueue(1, 1).close()
        assert segments() == before, seed


def test_a_terminal_that_nobody_reads_delays_the_end_and_leaves_nothing(tmp_path: Path) -> None:
    """It holds up the view, and so the end; but not for ever, and no segment is left.

    The workers still want to say why they leave: they go when somebody reads that.
    """
    prompts = write_prompts(tmp_path, PROMPTS * 1000)
    before = segments()
    with terminal("--workers", "2", "--prompts", prompts) as screen:
        screen.until_shown("─ memlane engine ─")
        until(lambda: "wait_woken" in blocked_in(screen.process.pid), "it writes")
        screen.process.terminate()
        assert screen.process.wait(PATIENCE) == 128 + signal.SIGTERM
        until(lambda: segments() == before)
        screen.until_end()
        assert not orphans(screen.process.pid)


def blocked_in(pid: int) -> set[str]:
    """The kernel functions in which its threads sleep."""
    return {task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/wchan")}


def until_first_line(screen: Terminal) -> None:
    """Wait until it has its handlers; what comes before that is the interpreter's own start."""
    status = Path(f"/proc/{screen.process.pid}/status")
    deadline = time.monotonic() + PATIENCE
    while (caught := re.search(r"SigCgt:\s*(\w+)", status.read_text())) is None or not (
        int(caught[1], 16) >> (signal.SIGQUIT - 1) & 1
    ):
        assert time.monotonic() < deadline, "it does not start"


def watch(screen: Terminal, seconds: float) -> None:
    """Reads for that long."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not screen.read(left):
            return


def send(screen: Terminal, kind: signal.Signals, to_all: bool) -> None:
    """To the whole foreground, as a terminal would, or to the scheduler."""
    if not to_all:
        screen.process.send_signal(kind)
    elif kind in KEYS:
        screen.type(KEYS[kind])
    else:
        os.killpg(screen.process.pid, kind)


def remarks(shown: str) -> list[str]:
    lines = without_codes(shown).replace("^C", "").replace("^\\", "").splitlines()
    return [line for line in complaints("\n".join(lines)) if not EXPECTED.match(line)]


def segments() -> set[str]:
    return {
        name for name in os.listdir("/dev/shm") if name.startswith(("memlane-", "vllm_offload_"))
    }


def orphans(session: int) -> list[str]:
    """Processes of that session that remain after they had time to notice that they are alone."""
    deadline = time.monotonic() + PATIENCE
    while found := _members(session):
        if time.monotonic() > deadline:
            return found
        select.select([], [], [], 0.01)
    return []


def _members(session: int) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, _, fields = (entry / "stat").read_text().rpartition(")")
            state, _, _, its_session = fields.split()[:4]
            if int(its_session) == session and state != "Z":
                found.append(name)
    return found
