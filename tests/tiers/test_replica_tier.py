"""Each replica of one host finds the blocks of all, right or not at all."""

import os
import resource
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import InvalidArgument, InvalidType, SystemFault
from memlane._native import SlotReader
from memlane.tiers import BlockPool, DiskTier, ReplicaTier, TierChain
from memlane.tiers.conformance import content, drain, key, range_of, wait_for
from tests.support import assert_in_time, dismiss, start, until
from tests.support.disk_tiers import tier_on
from tests.support.link import Link

ROW = 4096
Rows = np.ndarray[Any, Any]


def rows_of(count: int, row_bytes: int = ROW) -> Rows:
    return np.stack([content(number, row_bytes) for number in range(count)])


def store(tier: DiskTier, rows: Rows, *numbers: int) -> None:
    for number in numbers:
        rows[0] = content(number, rows.shape[1])
        assert wait_for(tier, tier.store([key(number)], [0])).ok.all()


def found(tier: ReplicaTier, rows: Rows, *numbers: int) -> list[int]:
    """Those that it loads, which are right."""
    there = []
    for number in numbers:
        rows[1] = 0
        if wait_for(tier, tier.load([key(number)], [1])).ok.all():
            np.testing.assert_array_equal(rows[1], content(number, rows.shape[1]))
            there.append(number)
    return there


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks for what is new whenever it is asked."""
    monkeypatch.setattr("memlane.tiers.remote.replicas._EVERY", 0.0)
    monkeypatch.setattr("memlane.tiers.remote.replicas._SHARE", 0)


@pytest.mark.parametrize("row_bytes", [ROW, 10_000])
def test_each_finds_what_the_others_have_stored(tmp_path: Path, soon: None, row_bytes: int) -> None:
    """And not what it has stored itself: its own tier has that."""
    rows = np.zeros((4, row_bytes), np.uint8)
    with (
        tier_on(tmp_path, rows, 8, opener="0") as first,
        tier_on(tmp_path, rows, 8, opener="1") as second,
        ReplicaTier(tmp_path, rows, own="0") as of_first,
        ReplicaTier(tmp_path, rows, own="1") as of_second,
        ReplicaTier(tmp_path, rows) as of_none,
    ):
        store(first, rows, 1, 2)
        store(second, rows, 3)
        assert found(of_first, rows, 1, 2, 3, 4) == [3]
        assert found(of_second, rows, 1, 2, 3, 4) == [1, 2]
        assert found(of_none, rows, 1, 2, 3, 4) == [1, 2, 3]
        assert of_none.has([key(1), key(3), key(4)]) == [True, True, False]
        until(lambda: of_first.has([key(1), key(3)]) == [False, True], "known")
    with ReplicaTier(tmp_path, rows, own="9") as later:  # whose owners have ended
        assert found(later, rows, 1, 2, 3, 4) == [1, 2, 3]


def test_a_replicas_blocks_are_found_within_a_second(tmp_path: Path) -> None:
    rows = np.zeros((4, ROW), np.uint8)
    with ReplicaTier(tmp_path / "later", rows) as others:
        assert found(others, rows, 1) == []
        with tier_on(tmp_path / "later", rows, 8) as tier:
            store(tier, rows, 1)
            begun = time.monotonic()
            until(lambda: found(others, rows, 1) == [1], "found")
            assert_in_time(3, begun)


def test_what_is_evicted_is_a_miss(tmp_path: Path, soon: None) -> None:
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(tmp_path, rows, 4) as tier, ReplicaTier(tmp_path, rows, own="9") as others:
        store(tier, rows, *range(4))
        assert found(others, rows, *range(4)) == [0, 1, 2, 3]
        store(tier, rows, *range(10, 13))
        assert found(others, rows, *range(4)) == [3]
        seen = others.statistics()
        assert (seen.corrupt, seen.errors) == (0, 0)


def test_what_its_owner_forgets_is_not_found(tmp_path: Path) -> None:
    """At once, though the index is old."""
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(tmp_path, rows, 8) as tier:
        store(tier, rows, 1, 2, 3)
        with ReplicaTier(tmp_path, rows, own="9") as others:
            assert found(others, rows, 1, 2, 3) == [1, 2, 3]
            tier.forget([key(1)])
            assert found(others, rows, 1, 2, 3) == [2, 3]
            tier.clear()
            assert found(others, rows, 1, 2, 3) == []


def test_what_it_forgets_itself(tmp_path: Path, soon: None) -> None:
    """Until it is stored again."""
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(tmp_path, rows, 8) as tier, ReplicaTier(tmp_path, rows, own="9") as others:
        store(tier, rows, 1, 2)
        others.forget([key(1), key(7)])
        assert found(others, rows, 1, 2) == [2]
        others.clear()
        assert found(others, rows, 1, 2) == []
        tier.forget([key(1)])
        store(tier, rows, 1, 5)
        assert found(others, rows, 1, 2, 5) == [1, 5]


@pytest.mark.parametrize("change", ["a byte", "short data", "short headers", "headers", "garbage"])
def test_changed_files_are_misses(tmp_path: Path, soon: None, change: str) -> None:
    """Are misses; the row is as it was."""
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(tmp_path, rows, 8, direct=False) as tier:
        store(tier, rows, 1, 2)
    headers, data = tmp_path / "0.headers", tmp_path / "0.data"
    with ReplicaTier(tmp_path, rows, own="9") as others:
        assert found(others, rows, 1, 2) == [1, 2]
        match change:
            case "a byte":
                for at in range(8):
                    with data.open("r+b") as file:
                        file.seek(at * ROW + 100)
                        file.write(b"\xff\x00\xff")
            case "short data":
                os.truncate(data, 10)
            case "short headers":
                os.truncate(headers, 4100)
            case "headers":
                headers.write_bytes(bytes(headers.stat().st_size))
            case _:
                headers.write_bytes(os.urandom(headers.stat().st_size))
        rows[:] = 7
        done = wait_for(others, others.load([key(1), key(2)], [2, 3]))
        assert (done.ok.any(), done.error) == (False, None)
        assert (rows == 7).all()


def test_files_that_are_others(tmp_path: Path, soon: None) -> None:
    """In files of another row size or namespace, without an owner, or behind a link nothing is
    found, nothing raises."""
    rows = np.zeros((4, ROW), np.uint8)
    wide = np.zeros((4, 2 * ROW), np.uint8)
    with (
        tier_on(tmp_path, rows, 8, opener="a", namespace="model") as mine,
        tier_on(tmp_path, rows, 8, opener="b", namespace="another") as theirs,
        tier_on(tmp_path, wide, 8, opener="c", namespace="model") as wider,
    ):
        for number, tier in enumerate((mine, theirs)):
            store(tier, rows, number)
        store(wider, wide, 2)
        (tmp_path / "d.headers").write_bytes(b"x" * 5000)
        (tmp_path / "e.headers").symlink_to(tmp_path / "a.headers")
        (tmp_path / "f.headers").mkdir()
        (tmp_path / "f.data").write_bytes(b"")
        os.mkfifo(tmp_path / "g.headers")
        (tmp_path / "g.data").write_bytes(b"")
        with ReplicaTier(tmp_path, rows, own="9", namespace="model") as others:
            assert found(others, rows, 0, 1, 2) == [0]


def test_headers_that_are_damaged_or_twice(tmp_path: Path, soon: None) -> None:
    """Say nothing of what comes later, and a key is forgotten in all its slots."""
    rows = np.zeros((4, ROW), np.uint8)
    with (
        tier_on(tmp_path, rows, 64, direct=False) as tier,
        ReplicaTier(tmp_path, rows, own="9") as others,
    ):
        store(tier, rows, 1)
        assert found(others, rows, 1) == [1]
        headers = os.open(tmp_path / "0.headers", os.O_RDWR)
        slot = next(at for at in range(64) if os.pread(headers, 64, 4096 + 64 * at) != bytes(64))
        os.pwrite(headers, b"\xff" * 64, 4096 + 64 * (slot ^ 1))
        os.pwrite(headers, os.pread(headers, 64, 4096 + 64 * slot), 4096 + 64 * (slot ^ 2))
        os.close(headers)
        others.forget([key(1)])
        assert found(others, rows, 1) == []
        others.clear()
        store(tier, rows, 2)
        assert found(others, rows, 1, 2) == [2]


def test_marks_end_with_the_files(tmp_path: Path, soon: None) -> None:
    """A new pair of files numbers its blocks anew."""
    rows = np.zeros((4, ROW), np.uint8)
    with ReplicaTier(tmp_path / "x", rows, own="9") as others:
        for number in range(3):
            with tier_on(tmp_path / "x", rows, 16) as tier:
                store(tier, rows, *range(10 * number, 10 * number + 5))
                assert len(found(others, rows, *range(30))) == 5
                others.clear()
                assert found(others, rows, *range(30)) == []
            shutil.rmtree(tmp_path / "x")
            assert found(others, rows, 0) == []


def test_no_descriptor_is_left(tmp_path: Path) -> None:
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(tmp_path, rows, 16) as tier:
        store(tier, rows, 1)
        before = len(os.listdir("/proc/self/fd"))
        others = ReplicaTier(tmp_path, rows, own="9")
        assert found(others, rows, 1) == [1]
        others.close()
        folder = os.path.realpath(tmp_path)
        names = [str(each.resolve()) for each in Path("/proc/self/fd").iterdir()]
        assert sum(name.startswith(folder) and name.endswith(".data") for name in names) == 1
        assert len(os.listdir("/proc/self/fd")) <= before + 1  # that of its reports


def test_a_pair_that_cannot_be_read_for_a_while(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Is tried again; the others serve."""
    monkeypatch.setattr("memlane.tiers.remote.replicas._RETRIED", 0.1)
    rows = np.zeros((4, ROW), np.uint8)
    with (
        tier_on(tmp_path, rows, 8, opener="a") as first,
        tier_on(tmp_path, rows, 8, opener="b") as second,
        ReplicaTier(tmp_path, rows, own="9") as others,
    ):
        store(first, rows, 1)
        store(second, rows, 2)
        with monkeypatch.context() as patch:

            def fail(path: str, *arguments: Any) -> SlotReader:
                if path.endswith("a"):
                    raise OSError(24, "too many open files")
                return SlotReader(path, *arguments)

            patch.setattr("memlane.tiers.remote.replicas.SlotReader", fail)
            assert found(others, rows, 1, 2) == [2]
        until(lambda: found(others, rows, 1, 2) == [1, 2], "read again")


def test_what_was_cleared_stays_so_after_an_error(
    tmp_path: Path, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pair that cannot be read for a while is opened again; what was forgotten is not found."""
    monkeypatch.setattr("memlane.tiers.remote.replicas._RETRIED", 0.0)
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(tmp_path, rows, 8) as tier, ReplicaTier(tmp_path, rows, own="9") as others:
        store(tier, rows, 1, 2)
        others.forget([key(1)])
        assert found(others, rows, 1, 2) == [2]
        others.clear()

        def fail(*_: object) -> int:
            raise OSError(5, "an error")

        with monkeypatch.context() as patch:
            patch.setattr("memlane.tiers.remote.replicas.os.stat", fail)
            assert found(others, rows, 1, 2) == []
        assert found(others, rows, 1, 2) == []
        store(tier, rows, 3)
        assert found(others, rows, 1, 2, 3) == [3]


def test_what_cannot_be_looked_at_cannot_be_cleared(tmp_path: Path, soon: None) -> None:
    """Without descriptors it would not see a block that is stored already, and find it later."""
    rows = np.zeros((4, ROW), np.uint8)
    with ReplicaTier(tmp_path, rows, own="9") as others, tier_on(tmp_path, rows, 8) as tier:
        store(tier, rows, 1)
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
        try:
            for call in (others.clear, lambda: others.forget([key(1)])):
                with pytest.raises(SystemFault, match="Too many open files"):
                    call()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        until(lambda: found(others, rows, 1) == [1], "found again")
        others.clear()
        assert found(others, rows, 1) == []


def test_a_pair_that_is_made_anew(tmp_path: Path, soon: None) -> None:
    rows = np.zeros((4, ROW), np.uint8)
    with ReplicaTier(tmp_path / "x", rows, own="9") as others:
        for number in range(3):
            with tier_on(tmp_path / "x", rows, 8) as tier:
                store(tier, rows, number)
                assert found(others, rows, 0, 1, 2) == [number]
            shutil.rmtree(tmp_path / "x")
        assert found(others, rows, 0, 1, 2) == []


def test_it_only_reads(tmp_path: Path) -> None:
    rows = rows_of(4)
    with tier_on(tmp_path, rows, 8), ReplicaTier(tmp_path, rows, own="9") as others:
        before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
        done = wait_for(others, others.store([key(1)], [1]))
        assert (done.ok.tolist(), done.error) == ([False], "a replica tier only reads")
        assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    rows = np.zeros((4, ROW), np.uint8)
    for wrong, error in (
        ({"path": 7}, InvalidType),
        ({"own": 7}, InvalidType),
        ({"threads": 0}, InvalidArgument),
        ({"rows": rows[0]}, InvalidArgument),
    ):
        with pytest.raises(error):
            ReplicaTier(**({"path": tmp_path, "rows": rows} | wrong))  # type: ignore[arg-type]


def _stores(link: Link, folder: str) -> None:
    """Role: replaces its blocks all the time, with others of the same keys."""
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(Path(folder), rows, 16, opener="busy") as tier:
        link.tell("ready")
        for number in range(1 << 20):
            rows[:] = [
                content(each, ROW) for each in range(4 * (number % 10), 4 * (number % 10) + 4)
            ]
            keys = [key(each) for each in range(4 * (number % 10), 4 * (number % 10) + 4)]
            wait_for(tier, tier.store(keys, range_of(4)))


def test_an_owner_that_replaces_blocks_and_is_killed(tmp_path: Path, soon: None) -> None:
    """Every block that is found is right, whatever the owner does meanwhile."""
    rows = np.zeros((8, ROW), np.uint8)
    peer = start(_stores, str(tmp_path))
    peer.hear()
    loaded = missed = 0
    with ReplicaTier(tmp_path, rows, own="0") as others:
        while min(loaded, missed) < 500:
            numbers = np.random.default_rng().choice(40, 8, replace=False).tolist()
            done = wait_for(others, others.load([key(each) for each in numbers], range_of(8)))
            for at, number in enumerate(numbers):
                if done.ok[at]:
                    np.testing.assert_array_equal(rows[at], content(number, ROW))
            loaded += int(done.ok.sum())
            missed += int((~done.ok).sum())
        peer.kill()
        assert len(found(others, rows, *range(40))) >= 8
    dismiss()


def test_two_replicas_share_what_they_compute(tmp_path: Path, soon: None) -> None:
    """The same prompts at both, in turn: with the other's blocks each is computed once."""

    def computed(shares: bool) -> int:
        folder = tmp_path / str(shares)
        count = 0
        rows = [np.zeros((16, ROW), np.uint8) for _ in range(2)]
        disks = [tier_on(folder, rows[at], 64, opener=str(at)) for at in range(2)]
        others = [ReplicaTier(folder, rows[at], own=str(at)) for at in range(2)]
        pools = [BlockPool(16, "lru") for _ in range(2)]
        chains = [
            TierChain(pools[at], rows[at], [disks[at], others[at]] if shares else [disks[at]])
            for at in range(2)
        ]
        for prompt in range(12):
            numbers = [*range(4 * prompt, 4 * prompt + 4)]
            for at in (prompt % 2, 1 - prompt % 2):
                with chains[at].fetch([key(each) for each in numbers], 5) as pin:
                    for row, number in zip(pin.ids, numbers, strict=False):
                        np.testing.assert_array_equal(rows[at][row], content(number, ROW))
                    missing = pin.missing
                    count += len(missing)
                    with pools[at].reserve(missing) as new:
                        for each, row in new:
                            rows[at][row] = content(int.from_bytes(each, "big"), ROW)
                        new.commit()
                # Whatever is evicted later is stored; here all of it is, at once.
                stored = disks[at].store(
                    [key(each) for each in numbers], _rows_of(pools[at], numbers)
                )
                drain(disks[at])
                disks[at].poll()
                assert stored
        for each in (*chains, *others, *disks):
            each.close()
        return count

    assert computed(shares=False) == 96
    assert computed(shares=True) == 48


def _rows_of(pool: BlockPool, numbers: list[int]) -> list[int]:
    with pool.pin([key(each) for each in numbers]) as pin:
        return pin.ids.tolist()


def test_a_look_does_not_keep_others_from_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes: they use what was found before."""
    monkeypatch.setattr("memlane.tiers.remote.replicas._EVERY", 0.0)
    monkeypatch.setattr("memlane.tiers.remote.replicas._SHARE", 0)
    looking, may_end = threading.Event(), threading.Event()
    is_slow = False

    class Slow(SlotReader):
        def look(self, in_any_case: bool) -> None:
            super().look(in_any_case)
            if is_slow and not looking.is_set():
                looking.set()
                may_end.wait(30)

    monkeypatch.setattr("memlane.tiers.remote.replicas.SlotReader", Slow)
    rows = np.zeros((4, ROW), np.uint8)
    with tier_on(tmp_path, rows, 8) as tier, ReplicaTier(tmp_path, rows, own="9") as others:
        store(tier, rows, 1)
        assert found(others, rows, 1) == [1]
        is_slow = True
        late = others.load([key(1)], [2])
        assert looking.wait(30)
        assert found(others, rows, 1) == [1]
        may_end.set()
        assert wait_for(others, late).ok.all()


def test_many_threads_load_while_others_look(tmp_path: Path, soon: None) -> None:
    """Whatever they find of an index that is replaced, they raise nothing."""
    rows = np.zeros((64, ROW), np.uint8)
    with (
        tier_on(tmp_path, rows, 64) as tier,
        ReplicaTier(tmp_path, rows, own="9", threads=8) as others,
    ):
        for number in range(200):
            rows[0] = content(number, ROW)
            tier.store([key(number)], [0])
            if number % 20 == 19:
                assert tier.drain(20)
                tier.clear()
            others.load([key(each) for each in range(32)], [*range(1, 33)])
        assert others.drain(30)
        assert {done.error for done in others.poll()} == {None}
        assert others.statistics().errors == 0
