"""Calls that are cancelled, and what happens once calls are done."""

import os
import signal
import threading
import time
from typing import Any

import pytest

from memlane import Call, Cancelled, TimedOut, WorkerDied, as_completed
from tests.support import PATIENCE, until
from tests.workers.roles import Model
from tests.workers.test_calls import gate, group_of


def test_a_cancelled_call_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    """By the workers that have not begun it; others answer it. Later calls run."""
    with gate() as (descriptor, open_it), group_of(2) as group:
        busy = group[0].submit(Model.waits, descriptor)
        calls = [group.submit(Model.step, number) for number in range(4)]
        calls += [group[0].submit(Model.step, number) for number in range(4, 6)]
        assert group[1].call(Model.history) == [[0, 1, 2, 3]]
        for call in calls[1:3] + calls[4:5]:
            call.cancel()
        calls[1].cancel()
        time.sleep(0.002)  # workers look once a millisecond; a slow machine makes it no shorter
        open_it()
        assert busy.result() == [b"x"]
        assert [call.result() for call in calls[::3]] == [[(0, n), (1, n)] for n in (0, 3)]
        for call in calls[1:3]:
            with pytest.raises(Cancelled):
                call.result()
        outcomes = calls[2].outcomes()
        assert isinstance(outcomes[0], Cancelled)
        assert outcomes[1] == (1, 2)
        assert calls[5].result() == [(0, 5)]
        calls[0].cancel()  # it is done
        assert group[0].call(Model.history) == [[0, 3, 5]]
    assert not caplog.text


def test_a_running_call_is_killed() -> None:
    """With `kill` the workers that run it are replaced, and others keep their state."""
    with gate() as (descriptor, _), group_of(2) as group:
        group.call(Model.step, 0)
        pids = group.pids
        running = group[0].submit(Model.waits, descriptor)
        behind = group.submit(Model.step, 1)
        assert group[1].call(Model.history) == [[0, 1]]
        behind.cancel(kill=True)  # no worker runs it
        assert group.pids == pids
        running.cancel(kill=True)
        with pytest.raises(WorkerDied):
            running.result()
        with pytest.raises(WorkerDied):
            behind.result()
        assert group.pids[1] == pids[1]
        assert group.call(Model.step, 2) == [(0, 2), (1, 2)]
        for number in range(3, 9):  # whose numbers are those that were cancelled before
            assert group[0].call(Model.step, number) == [(0, number)]


def test_cancelling_reaches_the_others_of_a_dead_worker() -> None:
    """It reaches the others, and the process in the dead one's place runs its first calls."""
    with gate() as (descriptor, open_it), group_of(2) as group:
        busy = group[0].submit(Model.waits, descriptor)
        call = group[0].submit(Model.step, 1)
        os.kill(group.pids[1], signal.SIGKILL)
        with pytest.raises(WorkerDied):
            group.check(PATIENCE)
        for _ in range(3):
            call.cancel()
        time.sleep(0.002)  # as above
        open_it()
        assert busy.result() == [b"x"]
        with pytest.raises(Cancelled):
            call.result()
        group.replace(1)
        assert [group.call(Model.step, n)[1] for n in range(4)] == [(1, n) for n in range(4)]


def test_callbacks_are_called_once() -> None:
    """They are called once, though nobody waits; at once if the call is done. One that raises stops
    no other, and one may call."""
    seen: list[Any] = []
    called = threading.Event()

    def calls_again(call: Call[Any]) -> None:
        seen.append(("again", *group.call(Model.step, 2)))
        called.set()

    def raises(call: Call[Any]) -> None:
        raise ValueError(call.name)

    with gate() as (descriptor, open_it), group_of(2, on_death="replace") as group:
        call = group[0].submit(Model.waits, descriptor)
        for callback in (raises, seen.append, calls_again):
            call.add_done_callback(callback)
        open_it()
        assert called.wait(PATIENCE)
        assert seen == [call, ("again", (0, 2), (1, 2))]
        call.add_done_callback(seen.append)
        assert seen[2:] == [call]
        dying = group[1].submit(Model.waits, descriptor)
        died = threading.Event()
        dying.add_done_callback(lambda _: died.set())
        os.kill(group.pids[1], signal.SIGKILL)
        assert died.wait(PATIENCE)
        closed = group[0].submit(Model.waits, descriptor)
        closed.add_done_callback(seen.append)
        group.kill()
        until(lambda: seen[3:] == [closed], "the callback of a call that is closed")


def test_as_completed_returns_calls_as_they_are_done() -> None:
    """Calls come in the order in which they are done, whatever their group."""
    with gate() as (descriptor, open_it), group_of(2) as group, group_of(1) as other:
        slow = group[0].submit(Model.waits, descriptor)
        calls: list[Call[Any]] = [slow, group[1].submit(Model.step, 1), other.submit(Model.step, 2)]
        order = as_completed(calls, timeout=PATIENCE)
        assert {next(order), next(order)} == {*calls[1:]}
        with pytest.raises(TimedOut, match="1 calls are not done"):
            next(as_completed([slow], timeout=0.05))
        open_it()
        assert [*order] == [slow]
        assert [*as_completed([])] == []
