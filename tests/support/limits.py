"""Scenarios with less and less of a resource, until they no longer start."""

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from memlane import MemlaneError
from tests.support import (
    Failing,
    Holdings,
    Link,
    holdings,
    nothing_fails,
    surplus,
    until,
)
from tests.support.starts import NETWORK, SCENARIOS


def limiting(which: int, value: int) -> Failing:
    """For a scenario: limits the resource while the block starts or closes something."""

    @contextmanager
    def limited(_stage: str) -> Iterator[None]:
        before = resource.getrlimit(which)
        resource.setrlimit(which, (value, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(which, before)

    return limited


def with_limits(_link: Link, name: str, which: int, values: Callable[[], Iterator[int]]) -> str:
    """Role: a scenario with more and more of a resource, until it succeeds."""
    scenario = {**SCENARIOS, **NETWORK}[name]
    scenario(nothing_fails)
    # Python itself may be the one that finds no addresses.
    refusals = (MemlaneError, MemoryError) if which == resource.RLIMIT_AS else MemlaneError
    failed = 0
    for value in values():
        before = holdings("memlane-")
        try:
            scenario(limiting(which, value))
        except refusals:
            failed += 1
        else:
            return f"failed {failed} times"
        finally:
            scenario(nothing_fails)
            until_nothing_is_left(before, f"at {value}")
    return "never came through"


def until_nothing_is_left(before: Holdings, when: str) -> None:
    """At once, except that a joined thread is visible for a moment longer."""

    def left() -> list[str]:
        return surplus(before, holdings("memlane-"))

    try:
        until(lambda: not left())
    except AssertionError:
        raise AssertionError(f"left {when}: {left()}") from None


def descriptors() -> Iterator[int]:
    """Room for 0, 1, 2 ... more descriptors."""
    highest = max(int(number) for number in os.listdir("/proc/self/fd"))
    while (first := os.dup(0)) < highest:  # no gaps below
        pass
    os.close(first)
    yield from range(first, first + 50)
