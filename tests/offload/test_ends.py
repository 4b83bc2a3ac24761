"""A region that ends in several threads, and forks in the middle of its start."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from memlane import Closed, WrongProcess
from tests.support import PATIENCE, Aside, Link, is_sanitized, start
from tests.support.missing import package
from tests.support.regions import Region, new_id, path_of, region_of

MIB = 1 << 20
ROUNDS = 25


def use(region: Region) -> None:
    """Uses the region until it is gone."""
    calls: tuple[Callable[[], object], ...] = (
        region.create_kv_memoryview,
        lambda: memoryview(region.create_kv_memoryview())[0, 0],
        lambda: region._base,
        lambda: repr(region),
    )
    while True:
        try:
            for call in calls:
                call()
        except Closed:
            return


def cleaning_up(_link: Link) -> None:
    for _ in range(ROUNDS):
        instance = new_id()
        region = region_of(instance, threads=1)
        users = [Aside(use, region) for _ in range(3)]
        ends = [Aside(region.cleanup) for _ in range(2)]
        for one in (*users, *ends):
            one.result()
        assert not path_of(instance).exists()


def test_cleanups_in_threads_crash_nothing() -> None:
    """Two cleanups at once, while others make views: views or Closed, no crash."""
    package("torch")
    start(cleaning_up).result()


def child_ends(child: int) -> int:
    """The child's exit status; a child that hangs is killed after a while."""
    for _ in range(int(10 * PATIENCE)):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        signal.sigtimedwait([], 0.1)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 99


def forking(_link: Link, rank: int | None, at_end: bool) -> None:
    instance = new_id()
    owner = os.getpid()
    children: list[int] = []

    def progress(done: int, total: int) -> None:
        if os.getpid() == owner and not children and (done == total or not at_end):
            children.append(os.fork())

    try:
        region = region_of(instance, rank, blocks=64, cell=MIB, threads=2, progress=progress)
    except WrongProcess:
        os._exit(0 if os.getpid() != owner else 8)
    if os.getpid() != owner:
        os._exit(9)
    assert child_ends(children[0]) == 0
    assert path_of(instance).exists()
    with region_of(instance, rank, blocks=64, cell=MIB) as other:
        assert not other._creator
    region.cleanup()
    assert not path_of(instance).exists()


@pytest.mark.skipif(is_sanitized("asan"), reason="libasan's malloc may be locked in the child")
@pytest.mark.parametrize("at_end", [False, True])
@pytest.mark.parametrize("rank", [None, 1])
def test_a_fork_in_a_start_raises_in_the_child(rank: Any, at_end: bool) -> None:
    """By `progress`, as by a signal handler: the parent's start continues, the child's raises."""
    start(forking, rank, at_end).result()
