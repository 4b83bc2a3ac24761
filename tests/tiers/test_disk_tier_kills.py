"""Kill -9 of a process that stores, at random moments: the next one finds only what is right.

``MEMLANE_SOAK_TIER_KILLS`` is the number of rounds (default 20), ``MEMLANE_SOAK_SLOTS`` how many
slots a large tier recovers (default 20,000).
"""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from memlane import TierInUse
from memlane.tiers import DiskTier
from memlane.tiers.conformance import content, key, wait_for
from tests.support import PATIENCE, Link, assert_in_time, start, until
from tests.support.disk_tiers import capacity_of, check_all, tier_on

ROUNDS = int(os.environ.get("MEMLANE_SOAK_TIER_KILLS", "20"))
SLOTS = int(os.environ.get("MEMLANE_SOAK_SLOTS", "20000"))
ROW, BLOCKS, KEYS = 8192, 40, 150
pytestmark = pytest.mark.soak(seconds=60 + 2 * ROUNDS)


def storing(link: Link, folder: Path, seed: int, direct: bool) -> None:
    """Role: stores, forgets and clears for ever; rows change as soon as they are reported.

    The file `forgotten` has a byte for each block: 1 if it must not be found. What the system is
    writing just now may be.
    """
    dice = random.Random(seed)
    rows = np.zeros((16, ROW), np.uint8)
    contents = {number: content(number, ROW) for number in range(KEYS)}
    forgotten = os.open(folder.parent / "forgotten", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.pwrite(forgotten, bytes(KEYS), 0)
    with tier_on(folder, rows, capacity=BLOCKS, direct=direct, policy="lru") as tier:
        link.tell("stores")
        busy: dict[int, list[int]] = {}
        written: set[int] = set()  # since the last drain
        free = list(range(16))
        for turn in itertools.count():
            if turn == 50:
                link.tell("has worked")
            numbers = dice.sample(range(KEYS), min(len(free), 4))
            at = [free.pop() for _ in numbers]
            for row, number in zip(at, numbers, strict=True):
                rows[row] = contents[number]
                os.pwrite(forgotten, b"\0", number)
            timeout = dice.choice([None, None, 1e-4, 1e-5])
            busy[tier.store([key(number) for number in numbers], at, timeout)] = at
            written.update(numbers)
            for done in tier.poll():
                free += busy.pop(done.ticket)
                rows[free] = 1  # an engine hands them on at once
            if dice.random() < 0.1:
                gone = dice.sample(range(KEYS), 5)
                tier.forget([key(number) for number in gone])
                for number in set(gone) - written:
                    os.pwrite(forgotten, b"\1", number)
            if dice.random() < 0.002:
                tier.clear()
            if not free:
                tier.drain(PATIENCE)
                written.clear()


def test_a_process_that_stores_is_killed(tmp_path: Path) -> None:
    """No wrong block, ever, and none that was forgotten; it restarts at once, within capacity."""
    dice = random.Random(5)
    folder = tmp_path / "kv"
    right = gone_keys = 0
    for number in range(ROUNDS):
        peer = start(storing, folder, number, bool(number % 2))
        assert peer.hear() == "stores"
        if number % 4:
            assert peer.hear() == "has worked"
        time.sleep(dice.random() * 0.05)  # it dies at any moment
        os.kill(peer.pid, signal.SIGKILL)
        rows = np.zeros((2, ROW), np.uint8)
        until(lambda: not is_used(folder), "its lock has gone")
        with tier_on(folder, rows, capacity=BLOCKS) as tier:
            found = tier.statistics().recovered
            assert found <= BLOCKS
            has = tier.has([key(number) for number in range(KEYS)])
            forgotten = (tmp_path / "forgotten").read_bytes()
            assert not any(there for there, gone in zip(has, forgotten, strict=True) if gone)
            gone_keys += sum(forgotten)
            loaded = check_all(tier, rows, range(KEYS))
            assert loaded <= found
            right += loaded
        size = sum(file.stat().st_size for file in folder.iterdir())
        assert size <= capacity_of(BLOCKS, ROW)
    assert right > ROUNDS  # most of them, but blocks are also forgotten
    assert gone_keys > ROUNDS


def is_used(folder: Path) -> bool:
    """Returns whether somebody still has the tier: a killed process ends in its own time."""
    try:
        tier_on(folder, np.zeros((2, ROW), np.uint8), capacity=BLOCKS).close()
    except TierInUse:
        return True
    return False


def opened(link: Link, folder: Path) -> None:
    """Role: has the tier open until it is killed."""
    with tier_on(folder, np.zeros((2, ROW), np.uint8), capacity=BLOCKS):
        link.tell("open")
        link.hear(PATIENCE)


def test_only_one_opener_at_a_time_is_allowed(tmp_path: Path) -> None:
    """The second is told whose it is; another opener works beside it; a death frees it."""
    rows = np.zeros((2, ROW), np.uint8)
    peer = start(opened, tmp_path)
    assert peer.hear() == "open"
    with pytest.raises(TierInUse, match=f"in use by process {peer.pid}; give another") as caught:
        tier_on(tmp_path, rows, capacity=BLOCKS)
    assert caught.value.pid == peer.pid
    with tier_on(tmp_path, rows, capacity=BLOCKS, opener="1"):
        pass
    os.kill(peer.pid, signal.SIGKILL)
    until(lambda: not is_used(tmp_path), "its lock has gone")
    with tier_on(tmp_path, rows, capacity=BLOCKS), pytest.raises(TierInUse):
        tier_on(tmp_path, rows, capacity=BLOCKS)


def opened_beside_forks(_link: Link, folder: Path) -> None:
    """Role: opens and closes a tier while another thread forks."""
    rows, ended = np.zeros((2, ROW), np.uint8), threading.Event()

    def fork() -> None:
        while not ended.is_set():
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)

    thread = threading.Thread(target=fork)
    thread.start()
    try:
        for _ in range(200):
            tier_on(folder, rows, capacity=BLOCKS).close()
    finally:
        ended.set()
        thread.join()


def test_it_is_opened_again_while_another_thread_forks(tmp_path: Path) -> None:
    """A child that has not closed its descriptors yet does not keep the lock of a closed tier."""
    start(opened_beside_forks, tmp_path, method="spawn").result()


def forgetting(link: Link, folder: Path) -> None:
    """Role: forgets what it is storing, and never polls."""
    with tier_on(folder, np.zeros((2, ROW), np.uint8), capacity=BLOCKS) as tier:
        tier.store([key(1), key(2)], [0, 1])
        tier.forget([key(1)])
        select.select([tier.fileno()], [], [])  # it is stored
        link.tell("forgotten")
        link.hear(PATIENCE)


def test_what_was_forgotten_while_it_was_stored(tmp_path: Path) -> None:
    """Is not there after a kill, either."""
    peer = start(forgetting, tmp_path)
    assert peer.hear() == "forgotten"
    os.kill(peer.pid, signal.SIGKILL)
    until(lambda: not is_used(tmp_path), "its lock has gone")
    with tier_on(tmp_path, np.zeros((2, ROW), np.uint8), capacity=BLOCKS) as tier:
        assert tier.has([key(1), key(2)]) == [False, True]


def test_a_large_tier_is_there_at_once(tmp_path: Path) -> None:
    """Every block of it; the bar is a second for a million slots."""
    rows = np.zeros((512, 512), np.uint8)
    nbytes = capacity_of(SLOTS, 512)
    numbers = range(SLOTS)
    with DiskTier(tmp_path, rows, nbytes, policy="lru", direct=False) as tier:
        for first in range(0, SLOTS, 512):
            batch = [key(number) for number in numbers[first : first + 512]]
            rows[: len(batch)] = (
                np.arange(first, first + len(batch), dtype=np.uint32)[:, None] % 251
            )
            assert wait_for(tier, tier.store(batch, np.arange(len(batch)))).ok.all()
    began = time.monotonic()
    with DiskTier(tmp_path, rows, nbytes, policy="lru", direct=False) as tier:
        moment = time.monotonic()
        assert tier.statistics().recovered == SLOTS
        assert all(tier.has([key(number) for number in numbers]))
        last = SLOTS - 7
        assert wait_for(tier, tier.load([key(last)], [3])).ok.all()
        assert (rows[3] == last % 251).all()
    print(f"\n{SLOTS} slots: {moment - began:.3f} s")
    assert_in_time(max(1.0, SLOTS / 1e6), began, moment)
