"""A system without room for another thread: an error of memlane's, never the end of the process; a
region populates its pages in the caller.

Fails without the guard: libzmq aborts the process if it cannot start its threads.
"""

import errno
import os
import resource
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from memlane import MessageQueue, SystemFault
from memlane._base.lifetime import start_thread
from memlane.groups import TcpGroup
from tests.support import PATIENCE, Alarm, Link, alarms, start
from tests.support.regions import new_id, path_of, populated_pages, region_of
from tests.support.remote_queues import HERE

NOBODY = 65534
MIB = 1 << 20
Begin = Callable[[], None]


def writer_to_other_hosts() -> None:
    MessageQueue(1, 0, connect_ip=HERE).close()


def group() -> None:
    TcpGroup(HERE, 0, 0, 1, secret="s" * 32, timeout=PATIENCE).close()


def region() -> None:
    region_of(new_id(), threads=4).cleanup()


beginnings = pytest.mark.parametrize("begin", [writer_to_other_hosts, group, region])


def become_limited(begin: Begin) -> None:
    """Root may have as many threads as there are, so it becomes somebody else.

    All that `begin` imports is there by then: that user may not read it.
    """
    begin()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)


def allow_threads(most: int) -> None:
    """Limits the threads of all processes of this user."""
    resource.setrlimit(resource.RLIMIT_NPROC, (most, resource.getrlimit(resource.RLIMIT_NPROC)[1]))


def threads_of_this_user() -> int:
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.geteuid():
                count += len(list((process / "task").iterdir()))
        except (FileNotFoundError, PermissionError):  # ended meanwhile, or hidden
            continue
    return count


def refused(begin: Begin) -> str | None:
    """The error, if there are too few threads."""
    try:
        begin()
    except SystemFault as error:
        return str(error) if error.errno == errno.EAGAIN else f"another error: {error!r}"
    return None


def starting_without_any(_link: Link, begin: Begin) -> str | None:
    become_limited(begin)
    allow_threads(0)
    return refused(begin)


def starting_with_more_and_more(_link: Link, begin: Begin) -> int:
    become_limited(begin)
    allowed = threads_of_this_user()
    while True:
        allow_threads(allowed)
        if refused(begin) is None:
            return allowed
        allowed += 1


@pytest.mark.parametrize("begin", [writer_to_other_hosts, group])
def test_an_error_says_that_threads_are_short(begin: Begin) -> None:
    """The error says that threads are short, and how to get more."""
    said = start(starting_without_any, begin).result()
    assert said is not None
    assert "thread" in said
    assert "ulimit -u" in said


def region_without_threads(_link: Link, rank: int | None, threads: int) -> list[int]:
    become_limited(region)
    allow_threads(0)
    instance, told = new_id(), list[int]()
    with region_of(
        instance,
        rank,
        cell=5 * MIB,
        threads=threads,
        progress=lambda done, _all: told.append(done),
    ) as made:
        made.mmap_obj[:] = b"\7" * made.total_size_bytes
        assert all(populated_pages(path_of(instance)))
    return told


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize(("rank", "nbytes"), [(None, 40 * MIB), (0, 20 * MIB)])
def test_a_region_is_populated_without_threads(rank: int | None, nbytes: int, threads: int) -> None:
    """The caller reserves and populates it, piece by piece.

    Fails without the guard: "cannot start a thread to populate pages".
    """
    told = start(region_without_threads, rank, threads).result()
    assert told == sorted(told)
    assert told[-1] == nbytes


@beginnings
def test_a_start_with_too_few_threads_fails_or_works(begin: Begin) -> None:
    """With one more thread at a time, each start fails with an error or works."""
    assert start(starting_with_more_and_more, begin).result() > 0


def test_a_handler_that_raises_leaves_a_thread_that_runs_or_one_that_never_will(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails without the other thread: KeyErrors in the place of the handler's error and of what was
    to run, and threads that began after the call had failed."""
    is_armed, raised, started = False, 0, 0
    lost: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    def handler() -> None:
        if is_armed:
            raise Alarm

    with alarms(handler, every=0.0003):
        while raised < 300 or not started:
            ran: list[object] = []
            thread = threading.Thread(target=ran.append, args=(None,), daemon=True)
            try:
                is_armed = True
                start_thread(thread)
                is_armed = False
                started += 1
            except Alarm:
                is_armed = False
                raised += 1
                if thread.ident is None:
                    later = threading.Thread(target=int)
                    later.start()
                    later.join()
                    assert not ran
                    assert not thread.is_alive()
                    continue
            thread.join()
            assert ran
            assert not lost
