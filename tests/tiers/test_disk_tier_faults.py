"""A disk tier whose disk fails, fills up, stalls, or keeps only a part of what was written."""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import os
import random
import resource
import select
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import SegmentRefused, SystemFault, TimedOut, Unsupported
from memlane._base.deadline import Deadline
from memlane._native import ask_owner
from memlane.tiers import DiskTier, disk
from memlane.tiers.conformance import content, key, wait_for
from memlane.tiers.tier import Namespace
from tests.base.test_failing_calls import calls
from tests.support import PATIENCE, Fault, Link, is_sanitized, start, until
from tests.support.built import preloaded
from tests.support.disk_tiers import check_all
from tests.support.disk_tiers import tier_on as any_tier_on

pytestmark = [
    pytest.mark.skipif(is_sanitized(), reason="a sanitizer goes before libc, too"),
    pytest.mark.usefixtures("hooks"),
]
tier_on = partial(any_tier_on, direct=False)  # by pread and pwrite, which can fail here
STALL = -1  # in place of an errno: native/tests/failing_calls.cpp
ROW = 4096
SHORT = 0.5  # seconds: a deadline that passes


def store(tier: DiskTier, rows: Any, number: int) -> bool:
    """Returns whether it was stored."""
    rows[0] = content(number, ROW)
    return bool(wait_for(tier, tier.store([key(number)], [0], timeout=PATIENCE)).ok[0])


def forgets(tier: DiskTier, *numbers: int) -> bool:
    """Has it forgotten; False if the disk does not do it in time."""
    try:
        tier.forget([key(number) for number in numbers])
    except SystemFault:
        return False
    return True


@contextmanager
def writes_into(path: Path) -> Iterator[None]:
    """Appends every write of memlane to that file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    shim = ctypes.CDLL(None)
    assert shim.failing_calls_watch(b"/memlane/_native.") == 0
    shim.failing_calls_record(file)
    try:
        yield
    finally:
        shim.failing_calls_record(-1)
        os.close(file)


@contextmanager
def logged() -> Iterator[list[str]]:
    """Returns what memlane logs meanwhile."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("memlane").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("memlane").removeHandler(handler)


def recorded(_link: Link, folder: Path) -> dict[int, str]:
    """Role: a full life of a tier; returns the names of the files' inodes."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder / "before", rows, capacity=6) as tier:
        for number in range(4):
            assert store(tier, rows, number)
    shutil.copytree(folder / "before", folder / "kv")
    with (
        writes_into(folder / "writes"),
        tier_on(folder / "kv", rows, capacity=6) as tier,
    ):
        for number in range(2, 16):
            assert store(tier, rows, number)
            if number == 8:
                tier.forget([key(7), key(3)])
            if number == 11:
                tier.clear()
        for number in (7, 3, 20):
            assert store(tier, rows, number)
    return {
        os.stat(folder / "kv" / name).st_ino: name for name in ("0.headers", "0.data", "0.uses")
    }


def parsed(path: Path, names: dict[int, str]) -> list[tuple[str, int, bytes]]:
    """(file, offset, bytes) of each write."""
    data, at, writes = path.read_bytes(), 0, []
    while at < len(data):
        inode, offset, size = struct.unpack_from("<3Q", data, at)
        writes.append((names[inode], offset, data[at + 24 : at + 24 + size]))
        at += 24 + size
    return writes


def test_any_part_of_what_was_written(tmp_path: Path) -> None:
    """After every prefix of the writes, and after random subsets, whole pages or torn: what loads
    is what was stored under that key, and the tier works."""
    names = start(recorded, tmp_path, method="spawn", command=preloaded()).result()
    writes = parsed(tmp_path / "writes", names)
    assert len(writes) > 30
    dice = random.Random(1)
    prefixes = [writes[:count] for count in range(len(writes) + 1)]
    subsets = [[each for each in writes if dice.random() < 0.7] for _ in range(60)]
    torn = [
        [
            (name, at, data[: dice.randrange(len(data) // 512 + 1) * 512])
            for name, at, data in writes
        ]
        for _ in range(60)
    ]
    for which in prefixes + subsets + torn:
        shutil.rmtree(tmp_path / "kv")
        shutil.copytree(tmp_path / "before", tmp_path / "kv")
        for name, at, data in which:
            with open(tmp_path / "kv" / name, "r+b") as file:
                file.seek(at)
                file.write(data)
        rows = np.zeros((8, ROW), np.uint8)
        with tier_on(tmp_path / "kv", rows, capacity=6) as tier:
            check_all(tier, rows, range(21))
            assert store(tier, rows, 30)
            check_all(tier, rows, [30])


def full_later(_link: Link, folder: Path) -> None:
    """Role: a disk that reserves no space, and later has none."""
    rows = np.zeros((8, ROW), np.uint8)
    with calls().failing(Fault("open", 1, "fallocate", errno.EOPNOTSUPP))("open"):
        tier = tier_on(folder, rows, capacity=20)
    with tier:
        assert store(tier, rows, 1)
        # The header is written, the data is not; then it is erased.
        with calls().failing(Fault("store", 2, "pwrite", errno.ENOSPC))("store"):
            assert not store(tier, rows, 2)
        assert tier.has([key(1), key(2)]) == [True, False]
        check_all(tier, rows, [1])
        assert store(tier, rows, 2)
        assert tier.statistics().errors == 1
    with tier_on(folder, rows, capacity=20) as tier:
        assert tier.has([key(1), key(2)]) == [True, True]


def test_a_disk_that_fills_up_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stores are declined, with one line; loads go on, and stores when there is space again."""
    start(full_later, tmp_path / "kv", method="spawn", command=preloaded()).result()


def full_now_and_then(_link: Link, folder: Path) -> list[str]:
    """Role: every other store finds no space; returns what was logged."""
    rows = np.zeros((8, ROW), np.uint8)
    with logged() as said, tier_on(folder, rows, capacity=20) as tier:
        for number in range(5):
            with calls().failing(Fault("store", 2, "pwrite", errno.ENOSPC))("store"):
                assert not store(tier, rows, number)
            assert store(tier, rows, number)
    return said


def test_trouble_is_said_once(tmp_path: Path) -> None:
    """Not each time that it begins."""
    said = start(full_now_and_then, tmp_path / "kv", method="spawn", command=preloaded()).result()
    assert said == [f"the tier in {tmp_path}/kv cannot store blocks: No space left on device"]


@contextmanager
def refused_from(nbytes: int) -> Iterator[None]:
    """Refuses every write behind so many bytes of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def bad_slots(_link: Link, folder: Path, bad: int, at_once: int) -> None:
    """Role: the last slots of a full tier refuse writes."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=24) as tier, logged() as said:
        for number in range(24):
            assert store(tier, rows, number)
        tier.touch([key(number) for number in range(24 - bad)])  # those in bad slots go first
        with refused_from((24 - bad) * ROW):
            good = 0
            for first in range(100, 180, at_once):
                keys = [key(number) for number in range(first, first + at_once)]
                good += int(wait_for(tier, tier.store(keys, range(at_once))).ok.sum())
            assert good == 80 - bad
            now = tier.statistics()
            assert (now.errors, now.retired, now.blocks) == (bad, bad, 24 - bad)
        assert said == [f"the tier in {folder} cannot store blocks: File too large"]


@pytest.mark.parametrize(("bad", "at_once"), [(1, 1), (8, 1), (8, 4), (8, 8)])
def test_a_slot_that_refuses_writes_is_not_used(tmp_path: Path, bad: int, at_once: int) -> None:
    """It costs one block, not all that are stored from then on."""
    start(bad_slots, tmp_path / "kv", bad, at_once, method="spawn").result()


def refuses_all(_link: Link, folder: Path) -> None:
    """Role: the disk refuses every write, and later none."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=200) as tier:
        for number in range(200):
            assert store(tier, rows, number)
        old = [key(number) for number in range(200)]
        with refused_from(0):
            for number in range(1000, 1300):
                done = wait_for(tier, tier.store([key(number)], [0]))
                assert (done.ok.tolist(), done.error) == ([False], os.strerror(errno.EFBIG))
            kept = sum(map(bool, tier.has(old)))
            assert kept >= 200 - 64 - 5  # and the victims of trials, one in some 15 s
        until(lambda: store(tier, rows, 2000), "a trial succeeds")
        assert tier.statistics().retired == 0
        for number in range(2001, 2001 + 200 - kept - 1):  # there is room for as many
            assert store(tier, rows, number)
        assert sum(map(bool, tier.has(old))) == kept


def test_a_disk_that_refuses_all_writes_keeps_its_blocks(tmp_path: Path) -> None:
    """Some are evicted in vain, not all; and once it takes writes again, all slots are used."""
    start(refuses_all, tmp_path / "kv", method="spawn").result()


def test_what_a_disk_refuses_is_counted_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for the first, then at most one a minute with how many more."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(tmp_path / "kv", rows, capacity=20) as tier, logged() as said:
        line = f"the tier in {tmp_path}/kv has found blocks that are not what was stored"
        for number in range(3):
            assert store(tier, rows, number)
            (tmp_path / "kv/0.data").write_bytes(bytes(20 * ROW))
            assert not wait_for(tier, tier.load([key(number)], [0])).ok[0]
        assert said == [line]
        monkeypatch.setattr(disk, "_QUIET", 0.0)
        assert tier.poll() == []
        assert [text.partition(" in 0 s")[0] for text in said[1:]] == [f"{line} (2 more blocks"]


def failing_reads(_link: Link, folder: Path) -> None:
    """Role: reads fail, the first is short."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=20) as tier:
        for number in range(4):
            assert store(tier, rows, number)
        with calls().failing(Fault("load", 2, "pread", errno.EIO))("load"):
            done = wait_for(tier, tier.load([key(1)], [1]))
        assert (done.ok.tolist(), done.error) == ([False], os.strerror(errno.EIO))
        assert tier.has([key(1), key(2)]) == [False, True]
        os.truncate(folder / "0.data", ROW)
        done = wait_for(tier, tier.load([key(0), key(2), key(3)], [1, 2, 3]))
        assert done.ok.sum() == 1  # the slot that is still there
        assert tier.statistics().corrupt == 2


def test_reads_that_fail(tmp_path: Path) -> None:
    """A miss for that key alone, which is not found any more."""
    start(failing_reads, tmp_path / "kv", method="spawn", command=preloaded()).result()


def unread_slots(_link: Link, folder: Path) -> None:
    """Role: one read fails, and no write does."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=20) as tier:
        assert store(tier, rows, 0)
        with calls().failing(Fault("load", 1, "pread", errno.EIO))("load"):
            assert not wait_for(tier, tier.load([key(0)], [1])).ok[0]
        until(lambda: tier.statistics().retired == 1, "the slot is set aside")
        numbers = itertools.count(1)
        until(
            lambda: store(tier, rows, next(numbers)) and tier.statistics().retired == 0,
            "it is used again",
        )


def test_a_slot_that_refused_a_read_is_tried_again(tmp_path: Path) -> None:
    """Otherwise a disk that stumbles while it is read loses capacity until a restart."""
    start(unread_slots, tmp_path / "kv", method="spawn", command=preloaded()).result()


def stalled(_link: Link, folder: Path, call: str) -> None:
    """Role: one call of a thread lasts, and lasts."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=20) as tier:
        for number in range(4):
            assert store(tier, rows, number)
        rows[:] = 0
        with calls().failing(Fault("stall", 1, call, STALL))("stall"):
            while not calls().is_reached():  # by its deadline; a thread may begin too late
                began = time.monotonic()
                if call == "pread":
                    ticket = tier.load([key(1)], [1], timeout=SHORT)
                else:
                    rows[2] = content(9, ROW)
                    ticket = tier.store([key(9)], [2], timeout=SHORT)
                done = wait_for(tier, ticket)
                assert not done.ok[0]
                assert time.monotonic() - began >= SHORT
            rows[2] = 7  # nobody's any more
            has = tier.has([key(2)])  # not yet taken for stalled
            assert has == [True] or time.monotonic() - began > SHORT + 1
            assert not tier.drain(SHORT + 1)
            assert tier.statistics().stalled
            assert tier.has([key(2)]) == [False]
            assert not wait_for(tier, tier.load([key(2)], [3])).ok[0]  # at once
            assert not store(tier, rows, 10)
            with pytest.raises(TimeoutError):
                tier.close(0)
        assert tier.drain(PATIENCE)
        assert not tier.statistics().stalled
        assert not rows[1].any()
        assert tier.has([key(2), key(9)]) == [True, False]
        check_all(tier, rows, [1, 2, 3])
    with tier_on(folder, rows, capacity=20) as tier:
        check_all(tier, rows, range(11))
        assert tier.has([key(9)]) == [False]


@pytest.mark.parametrize("call", ["pread", "pwrite"])
def test_a_disk_that_does_not_answer(tmp_path: Path, call: str) -> None:
    """Deadlines hold, then everything is a miss; when it answers, the tier goes on."""
    start(stalled, tmp_path / "kv", call, method="spawn", command=preloaded()).result()


def stalled_leader(_link: Link, folder: Path) -> None:
    """Role: a key is stored by two calls; the first has time, the second has none."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=20) as tier:
        with calls().failing(Fault("stall", 1, "pwrite", STALL))("stall"):
            first = tier.store([key(1)], [1], timeout=PATIENCE)
            until(calls().is_reached, "the disk does not answer")
            began = time.monotonic()
            done = wait_for(tier, tier.store([key(1)], [2], timeout=0.2))
            assert time.monotonic() - began >= 0.2
            assert (done.ok.tolist(), done.error) == ([False], "the deadline has passed")
            assert done.seconds >= 0.2
        assert wait_for(tier, first).ok.all()


def test_a_call_that_waits_for_another_has_a_deadline(tmp_path: Path) -> None:
    start(stalled_leader, tmp_path / "kv", method="spawn", command=preloaded()).result()


def forgotten_while_it_waits(link: Link, folder: Path) -> None:
    """Role: the only thread hangs; blocks are evicted for a store that it has not begun."""
    rows = np.zeros((8, ROW), np.uint8)
    disk._THREADS = 1
    with tier_on(folder, rows, capacity=3) as tier:
        for number in range(3):
            assert store(tier, rows, number)
        with calls().failing(Fault("stall", 1, "pwrite", STALL))("stall"):
            tier.store([key(9)], [1])
            until(lambda: tier.statistics().queue == 0, "it hangs")
            tier.store([key(10)], [2])
            assert tier.has([key(number) for number in range(3)]) == [False, False, True]
            tier.forget([key(1)])
            link.tell()
            link.hear()  # until it is killed


def test_what_was_evicted_for_a_store_that_waits_is_forgotten(tmp_path: Path) -> None:
    """Its slot has its header still; a kill must not bring it back. Others may come back."""
    peer = start(forgotten_while_it_waits, tmp_path / "kv", method="spawn", command=preloaded())
    peer.hear()
    peer.kill()
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(tmp_path / "kv", rows, capacity=3) as tier:
        assert tier.has([key(1), key(2)]) == [False, True]
        check_all(tier, rows, range(11))


def forgotten_before_a_poll(link: Link, folder: Path) -> None:
    """Role: what is forgotten was stored, but nobody has looked."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=3) as tier:
        tier.store([key(1), key(2)], [1, 2])
        select.select([tier.fileno()], [], [])
        tier.forget([key(1)])
        link.tell()
        link.hear()  # until it is killed


def test_what_was_stored_before_a_poll_is_forgotten(tmp_path: Path) -> None:
    peer = start(forgotten_before_a_poll, tmp_path / "kv")
    peer.hear()
    peer.kill()
    with tier_on(tmp_path / "kv", np.zeros((8, ROW), np.uint8), capacity=3) as tier:
        assert tier.has([key(1), key(2)]) == [False, True]


def erases_in_vain(_link: Link, folder: Path, what: str) -> None:
    """Role: the write that erases a header lasts, and lasts."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=20, timeout=0.3) as tier:
        for number in range(4):
            assert store(tier, rows, number)
        if what == "poll":
            with open(folder / "0.data", "r+b") as file:
                file.write(bytes(20 * ROW))
        with calls().failing(Fault("erase", 1, "pwrite", STALL))("erase"):
            if what == "poll":
                done = wait_for(tier, tier.load([key(1)], [1], timeout=PATIENCE))
                assert not done.ok[0]
            else:
                with pytest.raises(SystemFault, match=f"{folder} does not answer") as caught:
                    tier.clear() if what == "clear" else tier.forget([key(1)])
                assert caught.value.errno == errno.ETIMEDOUT
            until(calls().is_reached, "the header is being erased")
            assert tier.has([key(1), key(2)]) == [False, what != "clear"]
            assert not forgets(tier, 1)  # by now it is not in memory, but on the disk still
            until(lambda: tier.statistics().stalled, "the disk is known not to erase")
            assert not forgets(tier, 1)
            assert not tier.drain(0)
            for number in range(10, 26):  # the slot that is being erased is left alone
                assert store(tier, rows, number)
            assert all(tier.has([key(number) for number in range(10, 26)]))
        assert tier.drain(PATIENCE)
        assert not tier.statistics().stalled
        until(lambda: forgets(tier, 1, 10), "the disk is fast enough for its timeout")
    with tier_on(folder, rows, capacity=20) as tier:
        assert tier.has([key(1), key(2), key(10)]) == [False, what != "clear", False]
        check_all(tier, rows, range(26))


@pytest.mark.parametrize("what", ["forget", "clear", "poll"])
def test_a_disk_that_hangs_stops_no_thread(tmp_path: Path, what: str) -> None:
    """While a header is to be erased: the call ends in time, other threads run, and the tier goes
    on with other slots."""
    start(erases_in_vain, tmp_path / "kv", what, method="spawn", command=preloaded()).result()


ASKED = {"clear from outside": None, "purge from outside": Namespace(b"").id}


def refuses_to_erase(link: Link, folder: Path, what: str) -> None:
    """Role: the disk refuses the write of a header once; the next call comes, then a kill."""
    rows = np.zeros((8, ROW), np.uint8)
    tier = tier_on(folder, rows, capacity=20)
    assert store(tier, rows, 1)
    if what in ASKED:  # the first write is that of who asks
        with calls().failing(Fault("erase", 2, "pwrite", errno.EIO))("erase"):
            assert ask_owner(str(folder), "0", ASKED[what], PATIENCE) == errno.EIO
    else:
        with (
            calls().failing(Fault("erase", 1, "pwrite", errno.EIO))("erase"),
            pytest.raises(SystemFault, match="does not erase blocks; a restart may find them"),
        ):
            tier.clear() if what == "clear" else tier.forget([key(1)])
    assert tier.has([key(1)]) == [False]
    tier.forget([key(1)])
    link.tell()
    link.hear()  # until it is killed


@pytest.mark.parametrize("what", ["forget", "clear", *ASKED])
def test_what_a_disk_refused_to_erase_is_erased_by_the_next_call(tmp_path: Path, what: str) -> None:
    """A `forget` that returns means that no restart finds the block."""
    folder = tmp_path / "kv"
    peer = start(refuses_to_erase, folder, what, method="spawn", command=preloaded())
    peer.hear()
    peer.kill()
    with tier_on(folder, np.zeros((8, ROW), np.uint8), capacity=20) as tier:
        assert tier.has([key(1)]) == [False]


def refuses_late(_link: Link, folder: Path) -> None:
    """Role: the disk is slow to erase; what is under way then, it refuses."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=20) as tier:
        for number in (1, 2):
            assert store(tier, rows, number)
        every = calls()
        with ExitStack() as refused:
            with every.failing(Fault("erase", 1, "pwrite", STALL))("erase"):
                tier._begin_to_forget([key(2)])
                until(every.is_reached, "its header is being erased")
                refused.enter_context(refused_from(0))
                tier._begin_to_clear()
                orders = [tier._begin_to_forget([key(1)]) for _ in range(2)]
            for order in orders:
                with pytest.raises(SystemFault, match="a restart may find them"):
                    tier._wait_until_erased(order, Deadline(PATIENCE))
        tier.forget([key(1)])


def test_what_a_disk_refuses_to_erase_later_is_not_forgotten(tmp_path: Path) -> None:
    """A `forget` beside a `clear` that fails does not return as if nothing had been there."""
    start(refuses_late, tmp_path / "kv", method="spawn", command=preloaded()).result()
    with tier_on(tmp_path / "kv", np.zeros((8, ROW), np.uint8), capacity=20) as tier:
        assert tier.has([key(1), key(2)]) == [False, False]


@contextmanager
def file_system(place: Path, *make: str, size: int = 64 << 20, sector: int = 512) -> Iterator[Path]:
    """A small file system of its own, made by that command; ext4 if none is given."""
    make = make or ("mkfs.ext4", "-q")
    if shutil.which(make[0]) is None:
        pytest.skip(f"{make[0]} is not installed")
    image, disk = place / "image", place / "disk"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(size)
    attach = ["losetup", "-f", "--show", "-b", str(sector), image]
    device = subprocess.run(attach, check=True, capture_output=True, text=True).stdout.strip()
    try:
        subprocess.run([*make, device], check=True, capture_output=True)
        mounted = subprocess.run(["mount", device, disk], check=False, capture_output=True)
        if mounted.returncode:
            pytest.skip(f"cannot be mounted here: {mounted.stderr.decode().strip()}")
        try:
            yield disk
        finally:
            subprocess.run(["umount", disk], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


def store_twice(tier: DiskTier, rows: Any) -> int:
    """Writes over every slot once; returns how many blocks were stored."""
    stored, slots = 0, tier.statistics().slots
    for turn in range(2):
        for first in range(0, slots, len(rows)):
            keys = [key(turn * slots + at) for at in range(first, min(first + len(rows), slots))]
            stored += int(wait_for(tier, tier.store(keys, range(len(keys)))).ok.sum())
    return stored


@pytest.mark.root
@pytest.mark.parametrize(
    ("row_bytes", "is_direct"), [(4096, False), (16384, True), (36864, False), (65536, True)]
)
def test_a_disk_with_large_sectors_works_through_the_page_cache(
    tmp_path: Path, row_bytes: int, is_direct: bool
) -> None:
    """Rows that its direct I/O refuses go through the page cache, with a line that says so."""
    rows = np.zeros((64, row_bytes), np.uint8)
    make = ("mkfs.xfs", "-q", "-f", "-s", "size=16384", "-b", "size=16384")
    with (
        file_system(tmp_path, *make, size=512 << 20, sector=16384) as disk,
        logged() as said,
        any_tier_on(disk / "kv", rows, capacity=70) as tier,
    ):
        assert tier.is_direct == is_direct
        assert store_twice(tier, rows) == 140
        assert (len(said), tier.statistics().errors) == (not is_direct, 0)
        assert all("needs multiples of 16384 bytes" in line for line in said)


@pytest.mark.root
@pytest.mark.parametrize("make", [(), ("mkfs.btrfs", "-q", "-f")], ids=["ext4", "btrfs"])
@pytest.mark.parametrize("margin", [None, "40MiB"])
def test_a_capacity_beyond_the_disk_is_cut_to_its_space(
    tmp_path: Path, make: tuple[str, ...], margin: str | None
) -> None:
    """Leaves a part of the disk free, and takes every block that it promises."""
    rows = np.zeros((64, 65536), np.uint8)
    with file_system(tmp_path, *make, size=160 << 20) as disk:
        options: dict[str, Any] = {"policy": "lru", "timeout": PATIENCE, "margin": margin}
        with DiskTier(disk / "kv", rows, "1TiB", **options) as tier:
            slots = tier.statistics().slots
            assert store_twice(tier, rows) == 2 * slots
            now = os.statvfs(disk)
            left = (40 << 20) if margin else now.f_blocks * now.f_frsize // 20
            assert now.f_bavail * now.f_frsize > left * 0.9  # its own tables take some
        with DiskTier(disk / "kv", rows, "1TiB", **options) as tier:
            assert tier.statistics().slots >= slots * 0.99
            assert tier.statistics().recovered >= slots * 0.99


@contextmanager
def frozen(disk: Path) -> Iterator[None]:
    """Every write waits."""
    subprocess.run(["fsfreeze", "--freeze", disk], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", disk], check=True)


def on_a_frozen_disk(link: Link, disk: Path) -> None:
    """Role: every call of a tier while each write waits."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(disk / "kv", rows, capacity=20, timeout=0.5, direct=None) as tier:
        for number in range(8):
            assert store(tier, rows, number)
        tier.drain(PATIENCE)
        with open(disk / "kv/0.data", "r+b") as file:
            file.write(bytes(ROW))
            os.fsync(file.fileno())
        link.tell("stored")
        assert link.hear() == "frozen"
        with pytest.raises(SystemFault, match="does not answer"):
            tier.forget([key(7)])
        loaded = [
            wait_for(tier, tier.load([key(each)], [0], timeout=PATIENCE)).ok[0] for each in range(8)
        ]
        assert loaded.count(False) == 2  # one was forgotten, one has changed
        assert not wait_for(tier, tier.store([key(9)], [0])).ok[0]
        with tier.hold([key(1)]):
            tier.touch([key(1)])
        assert not tier.drain(0.1)
        tier.statistics()
        with pytest.raises(SystemFault, match="does not answer"):
            tier.clear()
        with pytest.raises(TimedOut):
            tier.close()
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        link.tell("lives")
        assert link.hear() == "thawed"
        assert tier.drain(PATIENCE)
        assert store(tier, rows, 9)
    with tier_on(disk / "kv", rows, capacity=20, direct=None) as tier:
        assert tier.has([key(each) for each in range(10)]) == [False] * 9 + [True]
    link.tell("done")


@pytest.mark.root
def test_a_frozen_file_system_stops_no_call(tmp_path: Path) -> None:
    """As one is for a snapshot, or by a disk that hangs."""
    with file_system(tmp_path) as disk:
        peer = start(on_a_frozen_disk, disk, method="spawn")
        assert peer.hear() == "stored"
        os.sync()
        with frozen(disk):
            peer.tell("frozen")
            assert peer.hear() == "lives"
        peer.tell("thawed")
        assert peer.hear() == "done"
        peer.join()


def forks_while_it_opens(link: Link, folder: Path) -> None:
    """Role: a thread opens a tier on a disk that does not answer; another one forks."""
    rows = np.zeros((8, ROW), np.uint8)
    opened: list[DiskTier] = []
    with calls().failing(Fault("open", 1, "open", STALL))("open"):
        thread = threading.Thread(target=lambda: opened.append(tier_on(folder, rows, capacity=20)))
        thread.start()
        until(lambda: folder.exists(), "it opens")
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        tier_on(folder.parent / "other", rows, capacity=20).close()
        assert not opened
    thread.join()
    with opened[0] as tier:
        assert store(tier, rows, 1)
    link.tell("done")


def test_a_disk_that_hangs_while_it_is_opened_stops_no_fork(tmp_path: Path) -> None:
    peer = start(forks_while_it_opens, tmp_path / "kv", method="spawn", command=preloaded())
    assert peer.hear() == "done"


def not_direct(_link: Link, folder: Path) -> None:
    """Role: a file system without O_DIRECT."""
    rows = np.zeros((8, ROW), np.uint8)
    with tier_on(folder, rows, capacity=6) as tier:
        assert store(tier, rows, 1)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    # Of the two files, then of the data again.
    with (
        calls().failing(Fault("open", 3, "open", errno.EINVAL))("open"),
        pytest.raises(Unsupported, match="has no O_DIRECT; leave out `direct`"),
    ):
        any_tier_on(folder, rows, capacity=3, direct=True)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    with (
        calls().failing(Fault("open", 3, "open", errno.EINVAL))("open"),
        any_tier_on(folder, rows, capacity=6) as tier,
    ):
        assert not tier.is_direct
        check_all(tier, rows, [1])


def refused_when_it_is_read(_link: Link, folder: Path) -> None:
    """Role: a file system that takes O_DIRECT in open() only."""
    rows = np.zeros((8, ROW), np.uint8)
    refusing = Fault("open", 1, "pread", errno.EINVAL)
    with calls().failing(refusing)("open"), logged() as said:
        tier = any_tier_on(folder / "kv", rows, capacity=20)
    with tier:
        assert (tier.is_direct, tier.engine) == (False, "threads")
        assert said == [f"the tier in {folder}/kv uses the page cache: direct I/O there is refused"]
        assert store(tier, rows, 1)
    with (
        calls().failing(refusing)("open"),
        pytest.raises(Unsupported, match="has no O_DIRECT; leave out `direct`"),
    ):
        any_tier_on(folder / "other", rows, capacity=20, direct=True)


def without_locks(_link: Link, folder: Path) -> None:
    """Role: a file system that knows no locks."""
    rows = np.zeros((8, ROW), np.uint8)
    said = rf"cannot lock {folder}/kv/0.headers \(.*\): its file system has no locks"
    for error in (errno.ENOLCK, errno.EOPNOTSUPP):
        with (
            calls().failing(Fault("open", 1, "fcntl", error))("open"),
            pytest.raises(SegmentRefused, match=said),
        ):
            tier_on(folder / "kv", rows, capacity=20)
    with tier_on(folder / "kv", rows, capacity=20) as tier:
        assert store(tier, rows, 1)


def test_a_disk_without_locks_is_named(tmp_path: Path) -> None:
    """The error is about the tier's file, not about /dev/shm."""
    start(without_locks, tmp_path, method="spawn", command=preloaded()).result()


def test_direct_is_tried_before_it_is_used(tmp_path: Path) -> None:
    """A tier whose disk refuses every direct read or write would store nothing, for ever."""
    start(refused_when_it_is_read, tmp_path, method="spawn", command=preloaded()).result()


def test_direct_is_refused_before_anything_changes(tmp_path: Path) -> None:
    start(not_direct, tmp_path / "kv", method="spawn", command=preloaded()).result()
