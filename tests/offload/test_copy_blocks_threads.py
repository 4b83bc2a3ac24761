"""copy_blocks beside other threads, forks and signals."""

import contextlib
import signal
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest

from memlane import InvalidArgument, copy_blocks
from tests.support import PATIENCE, Aside, Link, start

MIB = 1 << 20


def large() -> tuple[Any, Any, Any]:
    """96 MiB in blocks of 64 KiB, in reverse order."""
    src = np.full((1536, 65536), 3, np.uint8)
    ids = np.arange(1536)
    return src, np.zeros_like(src), np.stack([ids, ids[::-1]], 1)


def test_the_gil_is_let_go() -> None:
    """Another thread runs in the middle of a large move, though nobody is made to give up the GIL.

    It hangs if the GIL is kept: nothing else in the loop lets the other thread run.
    """
    src, dst, pairs = large()
    turn, ran = threading.Semaphore(0), []

    def run() -> None:
        turn.acquire()
        ran.append(True)

    other = Aside(run).until_blocked()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    try:
        turn.release()
        while not ran:
            copy_blocks(src, dst, pairs, threads=1)
    finally:
        sys.setswitchinterval(before)
    other.result()
    assert (dst == 3).all()


def test_pairs_that_change_meanwhile_are_used_as_checked() -> None:
    """The ids that were checked are used, though another thread writes wild ones."""
    blocks = 20_000
    src = np.ones((blocks, 64), np.uint8)
    memory = np.zeros(3 * blocks * 64, np.uint8)
    dst = memory[blocks * 64 : 2 * blocks * 64].reshape(blocks, 64)
    good = np.stack([np.arange(blocks), np.random.default_rng(1).permutation(blocks)], 1)
    pairs = good.copy()
    ended = threading.Event()

    def scribble() -> None:
        while not ended.is_set():
            pairs[-1] = (blocks // 2, 2 * blocks - 1)
            pairs[0, 1] = -blocks
            pairs[:] = good

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    outcomes: set[object] = set()
    try:
        for _ in range(200):
            try:
                outcomes.add(copy_blocks(src, dst, pairs))
            except InvalidArgument as error:
                outcomes.add(type(error).__name__)
    finally:
        ended.set()
        scribbler.join()
    assert outcomes <= {blocks * 64, "PairRefused"}
    assert not memory[: blocks * 64].any()
    assert not memory[2 * blocks * 64 :].any()


def test_several_threads_move_blocks_at_once() -> None:
    """Several threads move blocks at once, each with helper threads of its own."""
    src = np.random.default_rng(2).integers(0, 256, (512, 8192), np.uint8)
    ids = np.arange(512)

    def moved(number: int) -> bool:
        dst = np.zeros_like(src)
        for _ in range(5):
            copy_blocks(src, dst, np.stack([ids, np.roll(ids, number)], 1), threads=3)
        return bool((dst == np.roll(src, -number, 0)).all())

    calls = [Aside(moved, number) for number in range(4)]
    assert all(call.result() for call in calls)


def test_parent_and_child_go_on_with_threads_after_a_fork() -> None:
    """Parent and child continue to move with several threads: none is kept between calls."""
    src, dst, pairs = large()
    copy_blocks(src, dst, pairs, threads=2)

    def child(_link: Link) -> int:
        return copy_blocks(src, dst, pairs, threads=2)

    assert start(child).result() == 96 * MIB
    assert copy_blocks(src, dst, pairs, threads=2) == 96 * MIB


# Python 3.12 warns of any fork beside threads.
QUIET = ("-W", "ignore:This process:DeprecationWarning")

SIGNALLED = """
import os, signal, sys, threading, time
import numpy as np
from memlane import WrongProcess, copy_blocks
blocks = 1 << 22  # of 64 bytes, at random: several times the interval at which signals are seen
src = np.ones((1, 64), np.uint8)
dst = np.zeros((blocks, 64), np.uint8)
to = np.random.default_rng(1).permutation(blocks)
pairs = np.stack([np.zeros(blocks, int), to], 1)
owner, ended, is_busy = os.getpid(), False, False
def handle(*_):
    global is_busy
    if ended or is_busy:
        return
    is_busy = True  # the next signal may come before this one has been answered
    {action}
    is_busy = False
signal.signal(signal.SIGUSR1, handle)
def signals():
    while not ended:
        time.sleep(0.07)  # at any moment of a move, or between two
        os.kill(owner, signal.SIGUSR1)
signaller = threading.Thread(target=signals)
signaller.start()
try:
    while True:
        copy_blocks(src, dst, pairs, threads=2)
        if os.getpid() != owner:
            os._exit(1)  # the fork was made between two moves
except LookupError:
    ended = True
except WrongProcess:
    os._exit(0 if os.getpid() != owner else 9)
signaller.join()
assert copy_blocks(src, dst, pairs, threads=2) == dst.nbytes and dst.all()
"""


def play(action: str) -> None:
    """Long moves in a row, in another process, with a signal every now and then."""
    run = subprocess.run(
        [sys.executable, *QUIET, "-c", SIGNALLED.format(action=action)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, "")


def test_a_handler_that_raises_ends_the_move() -> None:
    """As with Ctrl-C: the error is raised, and the next move is complete."""
    play("raise LookupError")


def test_a_handler_that_raises_ends_the_helpers() -> None:
    """They stop too, so some blocks were not moved."""

    def raise_it(_signal: int, _frame: object) -> None:
        raise LookupError

    blocks = 1 << 22
    src = np.ones((1, 64), np.uint8)
    to = np.random.default_rng(1).permutation(blocks)
    pairs = np.stack([np.zeros(blocks, int), to], 1)
    before = signal.signal(signal.SIGVTALRM, raise_it)
    try:
        for _ in range(20):
            dst = np.zeros((blocks, 64), np.uint8)  # without its pages, so that no move is short
            with contextlib.suppress(LookupError):
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.02)  # it may come behind the move
                copy_blocks(src, dst, pairs, threads=2)
                signal.setitimer(signal.ITIMER_VIRTUAL, 0)
            if not dst.all():
                return
        pytest.fail("every move came to its end")
    finally:
        signal.signal(signal.SIGVTALRM, before)


def test_a_handler_may_fork_within_a_copy() -> None:
    """The child's copy of the call raises WrongProcess; the parent's continues."""
    play(
        "child = os.fork()\n"
        "    if child == 0: return\n"
        "    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:\n"
        "        raise LookupError"
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_a_refusal_leaves_no_thread(threads: int) -> None:
    """A move that is refused starts no thread (the fixture counts them)."""
    src, dst, pairs = large()
    pairs[-1] = pairs[0]
    with pytest.raises(InvalidArgument):
        copy_blocks(src, dst, pairs, threads=threads)
    assert not dst.any()
