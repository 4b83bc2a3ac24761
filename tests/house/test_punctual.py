"""The rule of time: what it forgives, and what it does not."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support import PATIENCE, Link, assert_in_time, late_since, start, until
from tests.support.leaks import children_of
from tests.support.punctual import Waker


@contextmanager
def another_waker() -> Iterator[Waker]:
    waker = Waker(min(os.sched_getaffinity(0)))
    try:
        yield waker
    finally:
        waker.close()


def stop_for(seconds: float, waker: Waker) -> tuple[float, float]:
    """A machine that lets nobody run; from when to when it did at least."""
    since = time.monotonic()
    os.kill(waker.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(waker.pid, signal.SIGCONT)
    return since, time.monotonic()


def test_what_is_late_on_a_machine_with_time_fails() -> None:
    """A thing that takes six times as long as promised has, whatever else runs."""

    def is_refused() -> bool:
        began = time.monotonic()
        time.sleep(0.6)  # is the thing
        try:
            assert_in_time(0.1, began)
        except AssertionError as error:
            return "0.1 s are promised, and the control was" in str(error)
        return False

    until(is_refused, "the control is on time for 0.6 s")


def test_a_lack_of_processors_is_forgiven_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to three times the promise, on a machine that always has somebody waiting."""
    monkeypatch.setattr("tests.support.punctual.Control.pressed", lambda *_: 10.0)
    monkeypatch.setattr("tests.support.punctual.Control.late", lambda *_: 0.0)
    assert_in_time(1.0, 5.0, 8.9)
    with pytest.raises(AssertionError, match=r"it took 4\.100 s"):
        assert_in_time(1.0, 5.0, 9.1)


def test_what_is_in_time_passes() -> None:
    """A promise that was kept needs no waker."""
    assert_in_time(1.0, 5.0, 5.9)
    assert_in_time(PATIENCE, time.monotonic())


def test_a_moment_is_no_promise() -> None:
    """With the two exchanged, every duration would be in time."""
    with pytest.raises(ValueError, match=r"assert_in_time\(promise, since, \.\.\.\)"):
        assert_in_time(PATIENCE + 1.0, 1.0)


def test_what_the_control_was_late_is_forgiven() -> None:
    """A machine that lets nobody run for half a second delays the control as well."""
    with another_waker() as waker:
        since, moment = stop_for(0.5, waker)
        assert waker.late(since, moment) > 0.4


def test_only_the_window_counts() -> None:
    """Lateness before the window forgives nothing in it."""
    with another_waker() as waker:
        _, moment = stop_for(0.5, waker)
        waker.late(moment, moment)

        def late() -> float:
            since = time.monotonic()
            return waker.late(since, since + 0.01)

        until(lambda: late() < 0.1, "the control is on time for 10 ms")


def test_the_control_is_no_leak() -> None:
    """It is not among the children of the test, and ends when it is closed."""
    assert children_of(os.getpid()) == []
    with another_waker() as waker:
        assert children_of(os.getpid()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(waker.pid, 0)


def test_forked_roles_share_the_control() -> None:
    """The test's control judges the work of a role in its own process."""

    def ask(_link: Link) -> float:
        return late_since(time.monotonic())

    assert start(ask).result() >= 0
