"""Stacks of several processes: one answer in time, whatever holds them."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from memlane._base import processes
from memlane.inspect import stacks
from memlane.inspect.stacks import NoStack, Stack, stacks_of
from tests.support import PATIENCE, Link, Peer, assert_in_time, given_time, start, until


def sleep(link: Link) -> None:
    """Role: sleeps until it is killed."""
    link.tell()
    time.sleep(3600)


@pytest.fixture
def sleepers() -> Iterator[list[Peer]]:
    peers = [start(sleep) for _ in range(4)]
    for peer in peers:
        peer.hear()
        peer.until_asleep()
    yield peers
    for peer in peers:
        peer.kill()


def started(*pids: int) -> dict[int, int]:
    return {pid: processes.status(pid)[1] or 0 for pid in pids}


def test_stacks_of_several_processes_are_shown(sleepers: list[Peer]) -> None:
    """A stopped one's too, which stays stopped."""
    os.kill(sleepers[0].pid, signal.SIGSTOP)
    until(lambda: processes.state(sleepers[0].pid) == "stopped")  # py-spy trips over the moment
    found = stacks_of(started(*(peer.pid for peer in sleepers)), timeout=PATIENCE)
    for peer in sleepers:
        seen = found[peer.pid]
        assert isinstance(seen, Stack), seen
        assert seen.main[0].name == "sleep"
    assert processes.state(sleepers[0].pid) == "stopped"


def test_all_of_them_are_asked_at_once(
    sleepers: list[Peer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If py-spy does not answer, they share one timeout instead of waiting one after another."""
    program = tmp_path / "py-spy"
    program.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked\nexec sleep 3600\n")
    program.chmod(0o755)
    monkeypatch.setattr(stacks, "_program", lambda: str(program))

    def are_asked(seconds: float) -> None:
        (tmp_path / "asked").write_text("")
        begun = time.monotonic()
        found = stacks_of(started(*(peer.pid for peer in sleepers)), timeout=seconds)
        assert all(isinstance(seen, NoStack) for seen in found.values())
        assert (tmp_path / "asked").read_text().count("x") == len(sleepers)
        assert_in_time(3 * seconds, begun)  # not 4

    given_time(are_asked, 2.0)


def test_a_process_with_a_reused_pid_is_left_alone(sleepers: list[Peer]) -> None:
    """It was started at another moment than the participant: it is not even asked."""
    pid = sleepers[0].pid
    found = stacks_of({pid: started(pid)[pid] - 1})
    assert found == {pid: NoStack("it has ended, or is not of this pid namespace")}


def test_the_reason_is_py_spys_last_cause(sleepers: list[Peer]) -> None:
    """Not a line of its own backtrace."""
    said = (
        "Error: Failed to get stack traces\n\nCaused by:\n    0: Failed to suspend process\n"
        "    1: unexpected waitpid result\n\nStack backtrace:\n   0: std::rt\n   1: main\n"
    )
    assert stacks._reason(sleepers[0].pid, said) == "unexpected waitpid result"
