"""A holder is killed before each system call of its life, from the first to the last.

`tests/crash` covers the points somebody thought of; here the kernel itself (ptrace) stops the
process at each call, so none is left out. ``MEMLANE_SOAK_CALLS=1`` takes every call in one run; the
default is every third, beginning at a different one each time.
"""

import ctypes
import os
import random
import signal
import time
from pathlib import Path

import pytest

from memlane import TimedOut
from tests.support import Link, Peer, late_since, start
from tests.support.missing import needed
from tests.support.regions import Region, new_id, path_of, region_of

STEP = int(os.environ.get("MEMLANE_SOAK_CALLS", "3"))
_TRACEME, _DETACH, _SYSCALL, _SETOPTIONS = 0, 17, 24, 0x4200
_MARK_CALLS = 1  # a stop at a system call is told from a signal
_libc = ctypes.CDLL(None, use_errno=True)


def trace(request: int, pid: int, data: int = 0) -> None:
    if _libc.ptrace(request, pid, None, ctypes.c_void_p(data)) != 0:
        raise OSError(ctypes.get_errno(), "ptrace")


def living(_link: Link, instance: str, participants: int | None) -> None:
    trace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    region_of(instance, 0, threads=1, participants=participants).cleanup()
    os._exit(0)


def comes_to_call(peer: Peer, number: int) -> bool:
    """Lets it run until it is about to make that call; False if it ended before."""
    os.waitpid(peer.pid, os.WUNTRACED)  # it has stopped itself
    trace(_SETOPTIONS, peer.pid, _MARK_CALLS)
    for _ in range(2 * number - 1):  # a stop before each call and one behind it
        trace(_SYSCALL, peer.pid)
        found = os.waitid(os.P_PID, peer.pid, os.WEXITED | os.WSTOPPED | os.WNOWAIT)
        if found is None or found.si_code in (os.CLD_EXITED, os.CLD_KILLED):
            return False
        os.waitpid(peer.pid, os.WUNTRACED)
    return True


def is_refused() -> bool:
    if (pid := os.fork()) == 0:
        os._exit(_libc.ptrace(_TRACEME, 0, None, None) != 0)
    return os.waitpid(pid, 0)[1] != 0


@needed("ptrace", not is_refused())
@pytest.mark.soak(seconds=120)
@pytest.mark.parametrize("participants", [None, 1])
def test_a_death_before_any_call_is_no_harm_to_the_next_start(participants: int | None) -> None:
    """The next start works at once, sees no old bytes, and leaves nothing."""
    instance = new_id()
    left = 0
    number = random.randrange(STEP)
    has_more = True
    while has_more:
        number += STEP
        peer = start(living, instance, participants)
        if has_more := comes_to_call(peer, number):
            peer.kill()
        else:
            assert peer.join() == 0
            assert not path_of(instance).exists()
        left += path_of(instance).exists()
        with region_of(instance, 1, threads=1, participants=participants) as region:
            assert region._creator
            assert not any(region.mmap_obj[:])
        assert not path_of(instance).exists()
    print(f"some {number} calls; before {left} of them a death leaves a file for the next start")
    assert number > 50
    assert 0 < left < number


def start_unless_it_waits(instance: str) -> Region | None:
    """On a machine that delays a start it is tried for longer."""
    for timeout in (0.05, 1.0):
        began = time.monotonic()
        try:
            return region_of(instance, 1, threads=1, timeout=timeout)
        except TimedOut:
            if late_since(began) < 0.01:
                return None
    return None


def starting(_link: Link, instance: str) -> None:
    trace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    region = region_of(instance, 0, threads=1)
    is_named = path_of(instance).stat().st_ino == os.fstat(region.fd or 0).st_ino
    region.cleanup()
    os._exit(0 if is_named else 1)


@needed("ptrace", not is_refused())
@pytest.mark.soak(seconds=120)
def test_start_beside_one_that_is_stopped_at_a_call() -> None:
    """Stopped is not dead: another joins, waits or creates, and takes nothing from it."""
    instance = new_id()
    waits = starts = 0
    number = random.randrange(STEP)
    while True:
        number += STEP
        peer = start(starting, instance)
        has_more = comes_to_call(peer, number)
        other = start_unless_it_waits(instance)
        if other is None:
            waits += 1
        else:
            starts += 1
        if not has_more:
            break
        trace(_DETACH, peer.pid)
        if peer.join() != 0:
            raise AssertionError(f"stopped at call {number} it lost its file to another")
        if other is not None:
            assert path_of(instance).exists()
            other.cleanup()
        assert not path_of(instance).exists()
    peer.join()
    if other is not None:
        other.cleanup()
    assert waits > 5
    assert starts > 5


def creating(_link: Link, instance: str) -> None:
    trace(_TRACEME, 0)
    os.kill(os.getpid(), signal.SIGSTOP)
    region = region_of(instance, 0, threads=1)
    is_creator = region._creator
    region.cleanup()
    os._exit(0 if is_creator else 1)


def has_opened(pid: int, path: Path) -> bool:
    links = Path(f"/proc/{pid}/fd").iterdir()
    return any(os.readlink(link) == str(path) for link in links)


@needed("ptrace", not is_refused())
@pytest.mark.soak(seconds=120)
def test_the_name_goes_while_somebody_joins() -> None:
    """As when the last participant maps the region: who has no place yet makes the next one."""
    instance = new_id()
    late = 0
    number = random.randrange(STEP)
    has_more = True
    while has_more:
        number += STEP
        peer = start(creating, instance)
        with region_of(instance, 1, threads=1):
            has_more = comes_to_call(peer, number)
            was_open = has_more and has_opened(peer.pid, path_of(instance))
            path_of(instance).unlink(missing_ok=True)
            if has_more:
                trace(_DETACH, peer.pid)
            late += peer.join() == 0 and was_open
            assert not path_of(instance).exists()
    assert late > 0
