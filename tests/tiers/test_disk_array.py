"""Several disks in one tier: what every tier promises; a disk takes only its share away."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    Closed,
    InvalidArgument,
    InvalidType,
    SystemFault,
    TierInUse,
    TimedOut,
    WrongProcess,
)
from memlane._native import PairOutside
from memlane.tiers import BlockPool, DiskArray, DiskTier, TierChain
from memlane.tiers.conformance import TierConformance, content, key, wait_for
from tests.base.test_failing_calls import calls
from tests.support import PATIENCE, Fault, Link, is_sanitized, start, until
from tests.support.built import preloaded
from tests.support.disk_tiers import capacity_of
from tests.tiers.test_disk_tier_faults import logged

ROW, KEYS = 4096, [key(number) for number in range(200)]
STALL = -1  # in place of an errno: native/tests/failing_calls.cpp
fails = pytest.mark.skipif(is_sanitized(), reason="a sanitizer goes before libc, too")


class TestDiskArray(TierConformance):
    """Three disks; those of few slots have one each, so that no key is without."""

    def open(self, place: Path, rows: Any, **options: Any) -> DiskArray:
        return array_on(place, "abc", rows, **{"timeout": 5.0, **options})


def array_on(place: Path, disks: str, rows: Any, slots: int = 400, **options: Any) -> DiskArray:
    options = {"timeout": PATIENCE, "policy": "lru", **options}
    return DiskArray([place / disk for disk in disks], rows, capacity_of(slots, ROW), **options)


def rows_of(numbers: range) -> Any:
    return np.stack([content(number, ROW) for number in numbers])


def store_all(tier: DiskArray, rows: Any) -> list[bool]:
    """Stores all keys from their rows, with no difference to what is there already."""
    rows[:] = rows_of(range(len(KEYS)))
    ok: list[bool] = wait_for(tier, tier.store(KEYS, range(len(KEYS)))).ok.tolist()
    return ok


def check(tier: DiskArray, rows: Any) -> list[bool]:
    """Loads all keys, compares those that are there, and returns which."""
    rows[:] = 0
    there: list[bool] = wait_for(tier, tier.load(KEYS, range(len(KEYS)))).ok.tolist()
    for number in np.flatnonzero(there).tolist():
        np.testing.assert_array_equal(rows[number], content(number, ROW))
    assert tier.has(KEYS) == there
    return there


def owners(tier: DiskArray) -> list[str]:
    """The folder's name of the disk that each key belongs to."""
    names = {disk: Path(path).name for path, disk in tier.disks.items()}
    found = {at: names[disk] for disk, _, places in tier.split(KEYS) for at in places}
    return [found[at] for at in range(len(KEYS))]


def test_a_disk_has_as_many_keys_as_it_has_slots(tmp_path: Path) -> None:
    """And its blocks are in its own folder, with its own statistics."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with array_on(tmp_path, "abc", rows) as tier:
        assert all(store_all(tier, rows))
        used = [disk.statistics().blocks for disk in tier.disks.values()]
        assert sum(used) == tier.statistics().blocks == len(KEYS)
        assert used == [owners(tier).count(name) for name in "abc"]
        assert min(used) > 40
        assert all(check(tier, rows))
        assert tier.statistics().loaded == len(KEYS)


def test_a_folder_that_is_left_out_or_added(tmp_path: Path) -> None:
    """Moves its own share of the keys; what was there before is found again, in any order."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with array_on(tmp_path, "abc", rows) as tier:
        before = owners(tier)
        assert all(store_all(tier, rows))
    with array_on(tmp_path, "ca", rows) as tier:
        assert check(tier, rows) == [owner != "b" for owner in before]
        assert all(store_all(tier, rows))
    with array_on(tmp_path, "dbac", rows) as tier:
        moved = [owner == "d" for owner in owners(tier)]
        assert 20 < sum(moved) < 90
        assert [o for o, is_new in zip(before, moved, strict=True) if not is_new] == [
            o for o in owners(tier) if o != "d"
        ]
        assert check(tier, rows) == [not is_new for is_new in moved]


def test_a_folder_that_cannot_be_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Is left out, with a line, and has its share again when it can be."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with array_on(tmp_path, "ab", rows) as tier:
        before = owners(tier)
        assert all(store_all(tier, rows))
    (tmp_path / "b").rename(tmp_path / "aside")
    (tmp_path / "b").touch()
    with array_on(tmp_path, "ab", rows) as tier, caplog.at_level(logging.WARNING):
        assert [*tier.disks] == [str(tmp_path / "a")]
        assert check(tier, rows) == [owner == "a" for owner in before]
    assert caplog.text.count("is left out until it is opened again") == 1
    assert f"{tmp_path}/b" in caplog.text
    with pytest.raises(SystemFault):
        array_on(tmp_path, "b", rows)
    (tmp_path / "b").unlink()
    (tmp_path / "aside").rename(tmp_path / "b")
    with array_on(tmp_path, "ab", rows) as tier:
        assert all(check(tier, rows))


def test_folders_that_are_none(tmp_path: Path) -> None:
    rows = np.zeros((8, ROW), np.uint8)
    for paths in ([], [tmp_path, f"{tmp_path}/"]):
        with pytest.raises(InvalidArgument):
            DiskArray(paths, rows, "1MiB")
    for one in (str(tmp_path), tmp_path, 7):
        with pytest.raises(InvalidType):
            DiskArray(one, rows, "1MiB")  # type: ignore[arg-type]
    with pytest.raises(InvalidType, match="policy"):
        DiskArray([tmp_path], rows, "1MiB", policy=object())
    with array_on(tmp_path, "b", rows):
        with pytest.raises(TierInUse):
            array_on(tmp_path, "ab", rows)
        array_on(tmp_path, "a", rows).close()  # it was not kept


def refuses_all(folder: Path) -> None:
    """From now on the disk of that folder refuses all writes, and reads other bytes."""
    full = os.open("/dev/full", os.O_RDWR)
    for each in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if os.readlink(each).startswith(f"{folder}/0."):
                os.dup2(full, int(each.name))


def failing(_link: Link, folder: Path) -> list[str]:
    """Role: a disk refuses all writes; returns what was logged."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with logged() as said, array_on(folder, "ab", rows, direct=False) as tier:
        is_good = [owner == "a" for owner in owners(tier)]
        assert all(store_all(tier, rows))
        refuses_all(folder / "b")
        assert check(tier, rows) == is_good
        assert store_all(tier, rows) == is_good
        assert tier.statistics().errors > 0
        pool = BlockPool(len(KEYS) // 2)
        with TierChain(pool, rows, [tier]) as chain:
            for number in range(4 * len(KEYS)):
                with pool.reserve([key(5000 + number)]) as new:
                    new.commit()
            chain.flush(PATIENCE)
            (use,) = chain.statistics().tiers
            assert not use.is_left_out
            assert use.failed > 0
            assert use.stored > 0
    return said


@fails
def test_a_disk_that_fails(tmp_path: Path) -> None:
    """Has its share of the misses; the others store and load, also behind a pool."""
    said = start(failing, tmp_path, method="spawn", command=preloaded()).result()
    assert f"the tier in {tmp_path}/b cannot store blocks: No space left on device" in said
    assert not any(f"{tmp_path}/a" in line or "is skipped" in line for line in said)


def hangs(_link: Link, folder: Path) -> None:
    """Role: a write of one disk does not return."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with array_on(folder, "ab", rows, direct=False) as tier:
        owner = owners(tier)
        assert all(store_all(tier, rows))
        more = [key(number) for number in range(1000, 1100)]
        b = tier.disks[f"{folder}/b"]
        of_b = next(own for disk, own, _ in tier.split(more) if disk is b)
        with calls().failing(Fault("stall", 1, "pwrite", STALL))("stall"):
            assert not wait_for(tier, tier.store(of_b[:1], [0], timeout=0.1)).ok[0]
            until(lambda: tier.statistics().stalled, "the disk is known not to answer")
            assert check(tier, rows) == [each == "a" for each in owner]
            of_a = [each for each in more if each not in of_b]
            assert wait_for(tier, tier.store(of_a, range(len(of_a)))).ok.all()
            assert not tier.drain(0)
        assert tier.drain(PATIENCE)


def on_disk(folder: Path) -> int:
    """The blocks that a restart would find."""
    each = PairOutside(f"{folder}/0").stored()
    return sum(blocks for _, blocks, *_ in each)


def removes_beside_a_hang(_link: Link, folder: Path, what: str) -> None:
    """Role: the first write that erases a header hangs."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with array_on(folder, "ab", rows, direct=False) as tier, ThreadPoolExecutor(1) as pool:
        assert all(store_all(tier, rows))
        with calls().failing(Fault("erase", 1, "pwrite", STALL))("erase"):
            removing = pool.submit(tier.clear if what == "clear" else lambda: tier.forget(KEYS))
            until(lambda: 0 in (on_disk(folder / "a"), on_disk(folder / "b")), "one has erased")
            assert calls().is_reached()
            assert not removing.done()
        removing.result()
        assert on_disk(folder / "a") == on_disk(folder / "b") == 0


@fails
@pytest.mark.parametrize("what", ["forget", "clear"])
def test_a_disk_that_hangs_delays_no_removal_on_another(tmp_path: Path, what: str) -> None:
    start(removes_beside_a_hang, tmp_path, what, method="spawn", command=preloaded()).result()


def hits(folder: Path) -> int:
    """Those that a restart would know of."""
    each = PairOutside(f"{folder}/0").stored()
    return sum(number for *_, number in each)


def closes_beside_a_hang(_link: Link, folder: Path) -> None:
    """Role: a load of one of the disks hangs while the array is closed in vain."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    for hung, other in (("a", "b"), ("b", "a")):
        tier = array_on(folder, "ab", rows, direct=False)
        owner = owners(tier)
        assert all(store_all(tier, rows))
        assert all(check(tier, rows))
        with calls().failing(Fault("stall", 1, "pread", STALL))("stall"):
            tier.load([KEYS[owner.index(hung)]], [0])
            until(calls().is_reached, "it hangs")
            with pytest.raises(TimedOut):
                tier.close(timeout=0.01)
            until(lambda other=other: hits(folder / other) > 0, "the other has its uses")
        tier.clear()
        tier.close()


@fails
def test_a_disk_that_hangs_costs_no_uses_of_another(tmp_path: Path) -> None:
    """The times when blocks were used are written for a restart, though the array cannot be
    closed."""
    start(closes_beside_a_hang, tmp_path, method="spawn", command=preloaded()).result()


def closes_beside_a_load(_link: Link, folder: Path) -> None:
    """Role: a load of one disk hangs while the array is closed."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    tier = array_on(folder, "ab", rows, direct=False)
    owner = owners(tier)
    assert all(store_all(tier, rows))
    number = owner.index("b")
    with calls().failing(Fault("stall", 1, "pread", STALL))("stall"):
        ticket = tier.load([KEYS[number]], [0])
        with pytest.raises(TimedOut):
            tier.close(timeout=0.1)
        assert tier.poll() == []
    assert wait_for(tier, ticket).ok.all()
    tier.close()


@fails
def test_a_close_that_times_out_closes_no_disk(tmp_path: Path) -> None:
    """The report of a load under way is not lost, and its row stays the load's."""
    start(closes_beside_a_load, tmp_path, method="spawn", command=preloaded()).result()


@fails
def test_a_disk_that_does_not_answer(tmp_path: Path) -> None:
    """Stops no call of the others."""
    start(hangs, tmp_path, method="spawn", command=preloaded()).result()


def stores(link: Link, folder: Path) -> None:
    """Role: stores all keys, again and again under new names, until it is killed."""
    rows = rows_of(range(len(KEYS)))
    tier = array_on(folder, "abc", rows)
    link.tell(store_all(tier, rows))
    numbers = range(len(KEYS))
    for turn in range(1 << 30):
        wait_for(tier, tier.store([b"%d:%d" % (turn, number) for number in numbers], numbers))


def test_an_array_finds_its_blocks_after_a_kill(tmp_path: Path) -> None:
    peer = start(stores, tmp_path)
    assert all(peer.hear())
    peer.kill()
    rows = np.zeros((len(KEYS), ROW), np.uint8)

    def is_free() -> bool:
        """Returns whether the locks have gone: io_uring of a killed process ends in its own
        time."""
        try:
            array_on(tmp_path, "abc", rows).close()
        except TierInUse:
            return False
        return True

    until(is_free, "the locks have gone")
    with array_on(tmp_path, "abc", rows) as tier:
        check(tier, rows)
        assert tier.statistics().recovered >= len(KEYS)


def test_what_is_forgotten_while_a_disk_is_left_out(tmp_path: Path) -> None:
    """Is said to be there, if that disk has it; and what another disk has from before goes, too."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with array_on(tmp_path, "ab", rows) as tier:
        store_all(tier, rows)
    with array_on(tmp_path, "abc", rows) as tier:
        tier.forget(KEYS)
    with array_on(tmp_path, "ab", rows) as tier:
        assert not any(tier.has(KEYS))
        store_all(tier, rows)
    (tmp_path / "b").rename(tmp_path / "kept")
    (tmp_path / "b").write_text("no folder")
    with array_on(tmp_path, "ab", rows) as tier:
        for call in (tier.clear, lambda: tier.forget(KEYS)):
            with pytest.raises(SystemFault, match="b is left out, and keeps its blocks"):
                call()
        assert not any(tier.has(KEYS))


def test_a_call_is_of_one_epoch(tmp_path: Path) -> None:
    """Though another thread changes it all the time."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    with array_on(tmp_path, "abc", rows) as tier:
        store_all(tier, rows)
        is_over = threading.Event()

        def change() -> None:
            while not is_over.is_set():
                tier.set_epoch(1)
                tier.set_epoch("")

        with ThreadPoolExecutor(1) as pool:
            changing = pool.submit(change)
            there = [sum(map(bool, tier.has(KEYS))) for _ in range(1000)]
            is_over.set()
            changing.result()
        assert {*there} <= {0, len(KEYS)}


def test_a_child_of_a_fork_has_no_part_in_it(tmp_path: Path) -> None:
    """Also if a thread was in a call when it forked."""
    rows = np.zeros((8, ROW), np.uint8)
    with array_on(tmp_path, "ab", rows) as tier:
        locked, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with tier._lock:
                locked.set()
                forked.wait(PATIENCE)

        def call(_link: Link) -> None:
            for each in (tier.poll, lambda: tier.store([key(1)], [0]), lambda: tier.has([key(1)])):
                with pytest.raises(WrongProcess):
                    each()

        with ThreadPoolExecutor(1) as pool:
            holding = pool.submit(hold)
            locked.wait(PATIENCE)
            child = start(call)
            forked.set()
            holding.result()
        child.result()


def test_an_array_that_is_closed(tmp_path: Path) -> None:
    rows = np.zeros((8, ROW), np.uint8)
    tier = array_on(tmp_path, "ab", rows)
    tier.store([key(1)], [1])
    tier.close()
    for call in (tier.statistics, tier.drain, lambda: tier.set_epoch(1)):
        with pytest.raises(Closed):
            call()


def test_a_close_that_was_interrupted_between_two_disks_is_finished_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    rows = np.zeros((2, ROW), np.uint8)
    tier = DiskArray(paths, rows, "1MiB", direct=False)
    second = [*tier.disks.values()][1]
    monkeypatch.setattr(second, "close", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tier.close()
    monkeypatch.undo()
    tier.close()
    DiskTier(paths[1], rows, "1MiB", direct=False).close()  # it is nobody's now
    tier.close()


def interrupt(_timeout: float) -> None:
    raise KeyboardInterrupt
