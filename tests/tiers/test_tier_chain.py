"""A pool with tiers behind it: what is found is the block of its key, and nobody waits."""

import contextlib
import gc
import itertools
import logging
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    Closed,
    ConcurrentUse,
    InvalidArgument,
    InvalidType,
    SystemFault,
    TimedOut,
    Unsupported,
    WrongProcess,
    inspect,
)
from memlane._base.deadline import Deadline
from memlane.tiers import BlockPool, DiskTier, ReplicaTier
from memlane.tiers.chain import TierChain
from memlane.tiers.conformance import content, key
from memlane.tiers.pool import PolicyName
from memlane.tiers.tier import CHANGED, Done
from memlane.tiers.waiting import Outage
from tests.support import PATIENCE, Aside, assert_in_time, until
from tests.support.lying_tiers import MemoryTier
from tests.support.missing import package
from tests.support.redis_servers import REFUSAL, RedisServer
from tests.support.remote_tiers import MemoryTransport, tier_in_memory

ROW = 4096
Rows = np.ndarray[Any, Any]


class Engine:
    """Computes blocks, and checks those that it finds."""

    def __init__(self, rows: Rows, pool: BlockPool, chain: TierChain) -> None:
        self.rows, self.pool, self.chain = rows, pool, chain

    def compute(self, *numbers: int) -> list[int]:
        """Returns those that have a block now."""
        with self.pool.reserve([key(number) for number in numbers]) as new:
            for each, row in new:
                self.rows[row] = content(int.from_bytes(each, "big"), ROW)
            new.commit()
            return [int.from_bytes(each, "big") for each, _ in new]

    def find(self, *numbers: int, timeout: float | None = PATIENCE) -> int:
        """Returns how many of them are found, from the first on."""
        with self.chain.fetch([key(number) for number in numbers], timeout) as pin:
            for number, row in zip(numbers, pin.ids, strict=False):
                np.testing.assert_array_equal(self.rows[row], content(number, ROW))
            assert bool(pin.missing) == (len(pin.ids) < len(numbers))
            return len(pin.ids)


@contextlib.contextmanager
def engine(
    make: Callable[[Rows], list[Any]], blocks: int = 16, policy: Any = "lru", **options: Any
) -> Iterator[Engine]:
    rows = np.zeros((blocks, ROW), np.uint8)
    pool = BlockPool(blocks, policy)
    with TierChain(pool, rows, make(rows), **options) as chain:
        yield Engine(rows, pool, chain)


@contextlib.contextmanager
def in_memory(
    blocks: int = 16, tiers: int = 1, policy: Any = "lru", **options: Any
) -> Iterator[tuple[Any, ...]]:
    """An engine, and tiers that do what they are told."""
    made: list[MemoryTier] = []

    def make(rows: Rows) -> list[Any]:
        made.extend(MemoryTier(rows) for _ in range(tiers))
        return [*made]

    with engine(make, blocks, policy, **options) as running:
        try:
            yield (running, *made)
        finally:
            for tier in made:
                tier.raises.clear()
                tier.is_silent = False
                tier.speak()


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "memlane")
    return lambda: [record.getMessage() for record in caplog.records]


# With real tiers -------------------------------------------------------------------------------


def test_behind_a_pool_there_is_a_disk(tmp_path: Path) -> None:
    """Ten times as many blocks as the pool has; all of them come back."""
    rows = np.zeros((32, ROW), np.uint8)
    pool = BlockPool(32, "lru")
    with (
        DiskTier(tmp_path / "disk", rows, "4MiB", policy="lru") as disk,
        TierChain(pool, rows, [disk], spare=8) as chain,
    ):
        one = Engine(rows, pool, chain)
        for number in range(0, 320, 4):
            assert one.compute(*range(number, number + 4)) == [*range(number, number + 4)]
            until(lambda: not poll_of(chain).storing, "stored")
        for number in reversed(range(0, 320, 8)):
            assert one.find(*range(number, number + 8)) == 8
            until(lambda: not poll_of(chain).storing, "stored")
        seen = chain.statistics()
        assert (seen.dropped, seen.loading) == (0, 0)
        assert seen.tiers[0].name == "DiskTier"
        assert seen.loaded == seen.tiers[0].loaded == seen.tiers[0].bytes_loaded // ROW
        assert seen.loaded + seen.hits == 320
    assert pool.statistics().reserved == 0


@pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
def test_a_disk_and_a_server_complete_each_other(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """Blocks for which the disk has no room come from the server; without the server, from the
    disk."""
    package("redis")
    from memlane.tiers import RedisTier

    rows = np.zeros((16, ROW), np.uint8)
    pool = BlockPool(16, "lru")
    server = RedisServer(tmp_path / "redis")
    try:
        with (
            DiskTier(tmp_path / "disk", rows, 8 * ROW, policy="lru") as disk,
            RedisTier(server.url, rows, timeout=PATIENCE) as remote,
            TierChain(pool, rows, [disk, remote], spare=4) as chain,
        ):
            one = Engine(rows, pool, chain)
            for number in range(64):
                one.compute(number)
                until(lambda: not poll_of(chain).storing, "stored")
            for number in range(0, 52, 4):  # the last twelve are in the pool
                assert one.find(*range(number, number + 4)) == 4
            from_disk, from_server = (use.loaded for use in chain.statistics().tiers)
            assert from_server > 30
            until(lambda: not poll_of(chain).storing, "stored")
            server.kill()
            begun = time.monotonic()
            assert one.find(900, timeout=0.1) == 0
            assert_in_time(1, begun)
            for number in range(100, 130):  # it goes on, from disk and pool
                one.compute(number)
                until(lambda: not poll_of(chain).storing, "stored")
            more = itertools.count(130)
            until(
                lambda: one.compute(next(more)) and poll_of(chain).tiers[1].is_left_out,
                "the server is left out",
            )
            for number in range(110, 118):
                is_there = disk.has([key(number)]) == [True]
                assert one.find(number) == 1 or not is_there
            assert chain.statistics().tiers[0].loaded > from_disk
            assert len([line for line in warnings() if "is skipped" in line]) == 1
            server.start()
            until(lambda: one.find(900) == 0 and not poll_of(chain).tiers[1].is_left_out, "back")
    finally:
        server.kill()


def poll_of(chain: TierChain) -> Any:
    chain.poll()
    return chain.statistics()


# What it does ----------------------------------------------------------------------------------


def test_what_is_evicted_is_stored_and_not_copied() -> None:
    with in_memory(blocks=8, spare=2) as (one, tier):
        tier.is_silent = True
        assert one.compute(0, 1, 2, 3, 4, 5) == [0, 1, 2, 3, 4, 5]
        with one.pool.pin([key(5)]) as pin:
            row = int(pin.ids[0])
        one.pool.touch([key(number) for number in range(5)])
        one.compute(6)
        assert tier.asked == [("store", [key(5)])]
        np.testing.assert_array_equal(one.rows[row], content(5, ROW))  # where it was
        seen = one.chain.statistics()
        assert (seen.storing, seen.spare) == (1, 1)
        tier.speak()
        assert poll_of(one.chain).spare == 2
        assert tier.blocks == {key(5): content(5, ROW).tobytes()}


def test_what_is_stored_already_is_not_stored_again() -> None:
    with in_memory(blocks=8, spare=2) as (one, tier):
        for number in range(20):
            one.compute(number)
        assert one.find(3) == 1
        before = len(tier.asked)
        stores = [keys for kind, keys in tier.asked if kind == "store"]
        for number in range(20, 40):
            one.compute(number)
        again = [keys for kind, keys in tier.asked[before:] if kind == "store"]
        assert [key(3)] in stores
        assert [key(3)] not in again


def test_of_a_burst_the_last_are_kept() -> None:
    with in_memory(blocks=16, spare=4) as (one, tier):
        one.compute(*range(12))
        one.compute(*range(20, 32))
        assert one.chain.statistics().dropped == 8
        (kind, keys), *others = tier.asked
        assert (kind, len(keys), others) == ("store", 4, [])
        assert set(keys) < {key(number) for number in range(12)}


def test_a_block_that_is_wanted_before_it_is_stored() -> None:
    with in_memory(blocks=8, spare=2) as (one, tier):
        tier.is_silent = True
        one.compute(*range(6))
        one.compute(6)
        ((_, (gone,)),) = tier.asked
        number = int.from_bytes(gone, "big")
        assert one.find(number, timeout=0) == 1
        assert one.chain.statistics().recalled == 1


def test_a_fetch_does_not_wait_longer_than_it_may() -> None:
    with in_memory() as (one, tier):
        tier.blocks = {key(number): content(number, ROW).tobytes() for number in range(8)}
        tier.is_silent = True
        begun = time.monotonic()
        assert one.find(*range(8), timeout=0) == 0
        assert one.find(*range(8), timeout=0.05) == 0
        assert time.monotonic() - begun >= 0.05
        assert_in_time(1, begun)
        assert len(tier.asked) == 1  # the second did not ask again
        tier.speak()
        assert one.find(*range(8), timeout=0) == 8


def test_a_prefetch_is_found() -> None:
    with in_memory() as (one, tier):
        tier.blocks = {key(number): content(number, ROW).tobytes() for number in range(6)}
        one.chain.prefetch([key(number) for number in range(9)])
        assert one.pool.statistics().accesses == 0
        assert select.select([one.chain], [], [], PATIENCE)[0]
        one.chain.poll()
        assert not select.select([one.chain], [], [], 0)[0]
        assert one.find(*range(9), timeout=0) == 6
        assert tier.asked == [("load", [key(number) for number in range(6)])]


def test_a_prefetch_takes_half_of_the_pool() -> None:
    with in_memory(blocks=16) as (one, tier):
        tier.blocks = {key(number): content(number, ROW).tobytes() for number in range(40)}
        tier.is_silent = True
        one.chain.prefetch([key(number) for number in range(40)])
        assert one.chain.statistics().loading == 8


def test_only_the_leading_run_is_loaded() -> None:
    """Nothing is loaded from the first block on that no tier has."""
    with in_memory(tiers=2) as (one, first, second):
        first.blocks = {key(number): content(number, ROW).tobytes() for number in (0, 2, 5)}
        second.blocks = {key(number): content(number, ROW).tobytes() for number in (1, 2, 6)}
        one.compute(3)
        assert one.find(*range(7)) == 4
        assert first.asked == [("load", [key(0), key(2)])]
        assert second.asked == [("load", [key(1)])]


def test_a_tier_that_does_not_know() -> None:
    """Is asked for no block until it does; what another one has is loaded at once."""
    with in_memory(tiers=2) as (one, first, second):
        knows, first.knows = first.knows, lambda _: None
        first.blocks = {key(0): content(0, ROW).tobytes()}
        second.blocks = {key(1): content(1, ROW).tobytes()}
        assert one.find(1, 0, 2, timeout=0) == 1
        assert (first.asked, second.asked) == ([], [("load", [key(1)])])
        first.knows = knows
        until(lambda: poll_of(one.chain).loaded == 2, "loaded")
        assert first.asked == [("load", [key(0)])]
        assert one.find(1, 0, 2, timeout=0) == 2
        second.knows = lambda _: None
        assert one.find(3, timeout=0.05) == 0
        assert len(second.asked) == 1


def test_a_block_is_stored_when_it_is_evicted_again() -> None:
    """A block that is evicted for the second time is stored."""
    with in_memory(blocks=8, spare=2, admission="second") as (one, tier):
        for number in range(10):
            one.compute(number)
        assert tier.asked == []
        assert one.chain.statistics().declined == 4
        one.compute(0)
        for number in range(10, 18):
            one.compute(number)
        assert ("store", [key(0)]) in tier.asked


def test_a_tier_counts_what_requests_ask_for_and_not_what_the_pool_evicts() -> None:
    """A request that asks again before its blocks are computed is one; a load counts by itself."""
    with in_memory(blocks=16, spare=4) as (engine, tier):
        assert [engine.find(1, 2, timeout=0) for _ in range(3)] == [0, 0, 0]
        assert tier.touched == [[key(1), key(2)]]
        engine.compute(1, 2)
        engine.compute(*range(10, 22))
        assert [keys for kind, keys in tier.asked if kind == "store"] == [[key(2), key(1)]]
        assert engine.find(1, 2) == 2
        assert tier.touched == [[key(1), key(2)]]
        engine.compute(*range(30, 42))  # evicts them once more
        tier.blocks.clear()
        engine.find(1, 2, timeout=0)
        assert tier.touched == [[key(1), key(2)]] * 2


def test_what_lies_behind_a_gap_is_asked_for_too() -> None:
    """The tier has it, and it is computed again because a block before it is not there."""
    with in_memory() as (engine, tier):
        tier.blocks[key(2)] = bytes(ROW)
        assert engine.find(1, 2) == 0
        assert sorted(each for keys in tier.touched for each in keys) == [key(1), key(2)]


def test_evictions_of_a_pool_are_no_accesses_of_a_disk(tmp_path: Path) -> None:
    with engine(lambda rows: [DiskTier(tmp_path / "kv", rows, "1MiB", policy="lru")]) as running:
        assert running.find(1, 2, timeout=0) == 0
        running.compute(1, 2)
        assert running.chain.flush(PATIENCE)
        running.compute(*range(10, 24))
        assert running.find(1, 2) == 2
        (disk,) = (each for each in inspect.segments() if each.counters.get("loaded") == 2)
        assert (disk.counters["accesses"], disk.counters["hits"]) == (4, 2)


def test_pinned_blocks_leave_no_room() -> None:
    with in_memory(blocks=8, spare=2) as (one, tier):
        tier.blocks = {key(number): content(number, ROW).tobytes() for number in range(50, 60)}
        one.compute(*range(6))
        with one.pool.pin([key(number) for number in range(6)]) as pin:
            assert len(pin.ids) == 6
            assert one.find(50, 51) == 0
        assert one.find(50, 51) == 2


def test_keys_that_come_twice() -> None:
    with in_memory() as (one, tier):
        tier.blocks = {key(0): content(0, ROW).tobytes()}
        assert one.find(0, 0, 1, 1) == 2


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "tuned"])
def test_random_calls_find_right_blocks_and_lose_none(policy: PolicyName) -> None:
    """Tiers that are silent, fail, forget and do not know: what is found is right all the same, and
    no block is lost."""
    for seed in range(6):
        draw = random.Random(seed)
        with in_memory(blocks=24, tiers=2, policy=policy, spare=4) as (one, *tiers):
            pins = []
            for _ in range(400):
                first = draw.randrange(60)
                numbers = range(first, first + draw.randrange(1, 6))
                tier = draw.choice(tiers)
                match draw.randrange(8):
                    case 0:
                        one.compute(*numbers)
                    case 1:
                        one.compute(*numbers)
                        one.find(*numbers, timeout=0)
                    case 2:
                        one.chain.prefetch([key(number) for number in numbers])
                    case 3:
                        tier.is_silent = not tier.is_silent
                    case 4:
                        tier.speak(draw.randrange(3))
                    case 5:
                        tier.fails = draw.random() < 0.2
                        tier.blocks.pop(key(first), None)
                        tier.knows = draw.choice((tier.knows, lambda _: None, lambda _: True))
                    case 6:
                        pins.append(one.chain.fetch([key(number) for number in numbers], 0))
                        if len(pins) > 2:
                            pins.pop(0).release()
                    case _:
                        one.find(*numbers, timeout=0)
            for pin in pins:
                pin.release()
            for tier in tiers:
                tier.is_silent = False
                tier.speak()
            seen = poll_of(one.chain)
            while seen.storing or seen.loading:
                seen = poll_of(one.chain)
            assert seen.spare == 4
            assert one.pool.statistics().reserved == 4
        assert one.pool.statistics().reserved == 0


# Tiers that fail -------------------------------------------------------------------------------


def test_a_failed_tier_is_tried_again_less_and_less_often() -> None:
    """After 1, 2, 4 ... 60 seconds, and one line a minute."""
    outage = Outage()
    now, pauses, lines = 100.0, [], 0
    for _ in range(9):
        lines += outage.begin(now)
        assert outage.lasts(now)
        assert not outage.begin(now)  # while it lasts nothing is new
        pauses.append(outage.until - now)
        now = outage.until
        assert not outage.lasts(now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert lines == 1
    outage.end()
    assert outage.begin(now)
    outage.end()
    assert not outage.begin(now + 1)  # within a minute
    assert outage.until == now + 2


@pytest.mark.parametrize("call", ["store", "load", "has", "poll", "reports"])
def test_a_tier_that_fails(call: str, warnings: Callable[[], list[str]]) -> None:
    """Is left out, with one line; the other one serves; later it is tried again."""
    with in_memory(blocks=8, spare=2, tiers=2, timeout=0.3) as (one, bad, good):
        good.blocks = {key(50): content(50, ROW).tobytes()}
        bad.blocks = {**good.blocks, key(51): content(51, ROW).tobytes()}
        if call == "reports":
            bad.fails = True
        else:
            bad.raises[call] = RuntimeError("it is broken")
        for number in range(20):
            one.compute(number)
        assert one.find(50) == 1
        assert one.find(3) == 1
        assert one.chain.statistics().tiers[0].is_left_out
        assert one.pool.statistics().left_out == 1
        assert [line for line in warnings() if "is skipped" in line] == [
            "tier MemoryTier failed and is skipped for a while: "
            + ("it fails" if call == "reports" else "it is broken")
        ]
        bad.raises.clear()
        bad.fails = False
        until(lambda: one.find(51) == 1, "it is tried again")
        until(lambda: not poll_of(one.chain).tiers[0].is_left_out or one.compute(99), "stores, too")
        until(lambda: poll_of(one.chain) and one.pool.statistics().left_out == 0, "nor is it shown")


def test_a_disk_that_is_full_is_read() -> None:
    """Stores and loads are judged apart."""
    with in_memory(blocks=8, spare=2) as (one, tier):
        tier.blocks = {key(50): content(50, ROW).tobytes()}
        tier.fails = True
        for number in range(10):
            one.compute(number)
        tier.fails = False
        assert one.chain.statistics().tiers[0].is_left_out
        assert one.find(50) == 1


def test_a_changed_block_is_no_outage() -> None:
    with in_memory() as (one, tier):
        tier.is_silent = True
        tier.blocks = {key(1): content(1, ROW).tobytes()}
        assert one.find(1, timeout=0) == 0
        tier.error = CHANGED
        tier.blocks.clear()
        tier.speak()
        seen = poll_of(one.chain)
        assert (seen.loading, seen.tiers[0].missed, seen.tiers[0].is_left_out) == (0, 1, False)


def test_a_slow_tier_leaves_spare_blocks_to_the_others() -> None:
    with in_memory(blocks=16, spare=4, tiers=2) as (one, slow, quick):
        slow.is_silent = True
        for number in range(40):
            one.compute(number)
        assert poll_of(one.chain).storing == 2
        assert len(slow.asked) == 2
        assert len(quick.asked) == 40 - 12


def test_a_tier_that_is_closed_meanwhile() -> None:
    rows = np.zeros((8, ROW), np.uint8)
    pool = BlockPool(8, "lru")
    tier = MemoryTier(rows)
    with TierChain(pool, rows, [tier], spare=2) as chain:
        one = Engine(rows, pool, chain)
        tier.is_silent = True
        for number in range(8):
            one.compute(number)
        assert chain.statistics().storing == 2
        for call in ("poll", "store", "load", "has"):
            tier.raises[call] = Closed("this tier is closed")
        assert one.find(40) == 0
        assert chain.statistics().storing == 0
        one.compute(*range(20, 26))


def test_a_forgotten_key_is_not_found() -> None:
    """Neither what is being loaded, nor what is aside, nor what a tier has."""
    with in_memory(blocks=8, spare=2) as (one, tier):
        tier.is_silent = True
        tier.blocks = {key(50): content(50, ROW).tobytes()}
        one.compute(*range(6))
        assert one.find(50, timeout=0) == 0  # it is being loaded, and has evicted another
        (_, (gone,)), (_, loading) = tier.asked
        assert loading == [key(50)]
        one.chain.forget([key(50), gone])
        assert tier.blocks == {}
        assert one.find(int.from_bytes(gone, "big"), timeout=0) == 0
        tier.blocks[key(50)] = content(50, ROW).tobytes()  # it was read before
        tier.speak()
        one.chain.poll()
        assert not one.pool.has([key(50)])[0]


def test_new_weights_hide_older_blocks() -> None:
    with in_memory(blocks=8, spare=2, tiers=2) as (one, first, second):
        for number in range(20):
            one.compute(number)
        first.is_silent = True
        one.find(1, timeout=0)
        one.chain.clear()
        assert (first.blocks, second.blocks) == ({}, {})
        first.blocks[key(1)] = content(1, ROW).tobytes()  # it was read before
        first.speak()
        one.chain.poll()
        assert not any(one.pool.has([key(number) for number in range(20)]))
        first.raises["clear"] = SystemFault("it does not answer", 5)
        one.compute(7)
        with pytest.raises(SystemFault):
            one.chain.clear()
        assert not one.pool.has([key(7)])[0]


# Threads, signals, ends ------------------------------------------------------------------------


def test_a_wait_that_is_over_is_woken_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While its descriptor is being closed, a weak reference to it would still give it."""
    rows = np.zeros((16, ROW), np.uint8)
    pool, found, close = BlockPool(16, "lru"), list[int](), os.close
    with (
        DiskTier(tmp_path / "disk", rows, "8MiB", policy="lru") as disk,
        TierChain(pool, rows, [disk]) as chain,
        monkeypatch.context() as patched,
    ):

        def closing(descriptor: int) -> None:
            found.append(len(chain._progress._waiting))
            close(descriptor)

        patched.setattr(os, "close", closing)
        assert not chain._progress.wait(lambda: False, Deadline(0.01))
    assert found
    assert not any(found)


def test_threads_take_turns(tmp_path: Path) -> None:
    """Each has keys of its own; all blocks are right."""
    rows = np.zeros((64, ROW), np.uint8)
    pool = BlockPool(64, "lru")
    wrong: list[BaseException] = []
    with (
        DiskTier(tmp_path / "disk", rows, "8MiB", policy="lru") as disk,
        TierChain(pool, rows, [disk]) as chain,
    ):
        one = Engine(rows, pool, chain)

        def work(base: int) -> None:
            try:
                for number in range(base, base + 150):
                    one.compute(number)
                    if number % 50 == 30:  # however slow the disk is, something is on it then
                        chain.flush(PATIENCE)
                    one.find(max(base, number - 40), timeout=0.2)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=partial(work, 1000 * each)) for each in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        assert wrong == []
        assert chain.statistics().loaded > 0


def test_a_report_that_another_thread_takes_wakes_whoever_waits() -> None:
    with in_memory() as (one, tier):
        tier.blocks = {key(1): content(1, ROW).tobytes()}
        tier.is_silent = True
        found: list[int] = []
        waiting = threading.Thread(target=lambda: found.append(one.find(1, timeout=None)))
        waiting.start()
        until(lambda: bool(one.chain._progress._waiting), "it waits")
        with one.chain._progress.lock:  # so that this thread is first
            tier.speak()
            one.chain.poll()
        waiting.join(PATIENCE)
        assert found == [1]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_handlers_that_raise() -> None:
    """End the call alone; no block is wrong, and the chain is closed as ever."""

    class Interrupted(BaseException):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    draw = random.Random(1)
    with in_memory(blocks=24, spare=4, timeout=0.2) as (one, tier):
        tier.knows = lambda _: None
        before = signal.signal(signal.SIGALRM, interrupt)
        interrupted = 0
        try:
            for _ in range(600):
                first = draw.randrange(60)
                try:
                    signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 4e-4))
                    for _ in range(4):
                        one.compute(*range(first, first + 3))
                        one.find(*range(first, first + 4), timeout=0)
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    interrupted += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert interrupted > 100
        until(lambda: not poll_of(one.chain).loading + poll_of(one.chain).storing, "idle")
        gc.collect()
        seen = one.pool.statistics()
        assert (poll_of(one.chain).spare, seen.reserved, seen.pinned) == (4, 4, 0)
        for _ in range(50):
            one.compute(*range(100, 110))
            one.find(*range(100, 110))


def test_a_forked_child_has_no_chain() -> None:
    with in_memory() as (one, _):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                for call in (one.chain.poll, partial(one.pool.reserve, [key(1)])):
                    with contextlib.suppress(WrongProcess):
                        call()
                        os._exit(2)
                one.chain.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert one.compute(1) == [1]


def test_a_child_that_was_forked_beside_a_call() -> None:
    """The calling thread does not exist in the child, where it would hold the lock for ever."""
    with in_memory() as (one, tier):
        is_within, may_end = threading.Event(), threading.Event()

        def knows(_: bytes) -> bool:
            is_within.set()
            return not may_end.wait(30)

        tier.knows = knows
        thread = threading.Thread(target=one.find, args=(1,))
        thread.start()
        assert is_within.wait(30)
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            with contextlib.suppress(WrongProcess):
                one.pool.reserve([key(1)])
                os._exit(2)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        may_end.set()
        thread.join()


def test_it_is_not_closed_while_blocks_are_under_way() -> None:
    rows = np.zeros((8, ROW), np.uint8)
    pool = BlockPool(8, "lru")
    tier = MemoryTier(rows)
    chain = TierChain(pool, rows, [tier], spare=2)
    tier.is_silent = True
    one = Engine(rows, pool, chain)
    for number in range(7):
        one.compute(number)
    with pytest.raises(TimedOut, match="must not be freed"):
        chain.close(0.05, store=False)
    with pytest.raises(Closed):
        chain.fetch([key(1)])
    assert pool.statistics().reserved == 1  # what is being stored
    assert one.compute(*range(20, 30)) == [*range(20, 27)]
    assert len(tier.asked) == 1
    tier.speak()
    chain.close()
    chain.close()
    assert pool.statistics().reserved == 0
    assert len(one.compute(*range(30, 40))) == 8
    with TierChain(BlockPool(8), rows, [tier]):
        pass


def test_the_rows_are_free_afterwards(tmp_path: Path) -> None:
    memory = bytearray(16 * ROW)
    rows = memoryview(memory).cast("B", (16, ROW))
    with (
        DiskTier(tmp_path / "disk", rows, "1MiB") as disk,
        TierChain(BlockPool(8), rows, [disk]) as chain,
    ):
        chain.fetch([key(1)]).release()
    rows.release()
    memory.extend(b"x")  # a BufferError while somebody refers to it


def test_a_close_that_is_interrupted_is_done_by_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.zeros((8, ROW), np.uint8)
    chain = TierChain(BlockPool(8, "lru"), rows, [MemoryTier(rows)], spare=2)
    with monkeypatch.context() as interrupted:

        def interrupt() -> None:
            raise KeyboardInterrupt

        interrupted.setattr(chain._moves, "release_memory", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chain.close()
    chain.close()
    assert chain._ready.closed
    assert chain._moves._memory.size == 0


def test_bad_arguments_are_refused() -> None:
    rows = np.zeros((8, ROW), np.uint8)
    pool = BlockPool(8, "lru")
    tier = MemoryTier(rows)
    for wrong, error in (
        ((7, rows, [tier]), InvalidType),
        ((pool, 7, [tier]), InvalidType),
        ((pool, rows[:7], [tier]), InvalidArgument),
        ((pool, rows, []), InvalidArgument),
        ((pool, rows, [7]), InvalidType),
        ((pool, rows, 7), InvalidType),
        ((pool, rows, [tier, tier]), InvalidArgument),
        ((BlockPool(1), rows, [tier]), InvalidArgument),
    ):
        with pytest.raises(error):
            TierChain(*wrong)  # type: ignore[arg-type]
    for options in ({"spare": 0}, {"spare": 8}, {"admission": "third"}, {"timeout": None}):
        with pytest.raises(InvalidArgument):
            TierChain(pool, rows, [tier], **options)  # type: ignore[arg-type]
    assert pool.statistics().used == 0
    with TierChain(pool, rows, [tier]) as chain:
        with pytest.raises(InvalidArgument, match="has a chain already"):
            TierChain(pool, rows, [tier])
        for call in (chain.fetch, chain.prefetch, chain.forget):
            with pytest.raises(InvalidType):
                call(["text"])  # type: ignore[list-item]
            with pytest.raises(InvalidType, match="keys must be a sequence"):
                call(None)  # type: ignore[arg-type]
            with pytest.raises(InvalidArgument):
                call([b""])
        with pytest.raises(InvalidType):
            chain.fetch([key(1)], "soon")  # type: ignore[arg-type]
        assert tier.asked == []
    full = BlockPool(8, "lru")
    with full.reserve([key(number) for number in range(8)]) as new:
        new.commit()
    with pytest.raises(InvalidArgument, match="free blocks"):
        TierChain(full, rows, [tier])


# What must not happen ---------------------------------------------------------------------------


class Interrupting(MemoryTier):
    """A signal comes at the end of these calls."""

    calls: tuple[str, ...] = ()

    def _begin(self, kind: str, keys: Sequence[bytes], ids: Any) -> Any:
        ticket = super()._begin(kind, keys, ids)
        if kind in self.calls:
            signal.raise_signal(signal.SIGUSR1)
        return ticket

    def has(self, keys: Sequence[bytes]) -> Any:
        if "has" in self.calls:
            signal.raise_signal(signal.SIGUSR1)
        return super().has(keys)


@contextlib.contextmanager
def handling(work: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: work())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_handler_that_raises_within_a_call_of_a_tier(kind: str) -> None:
    """The tier has begun all the same: its rows are nobody else's until it is done."""
    rows = np.zeros((8, ROW), np.uint8)
    pool = BlockPool(8, "lru")
    tier = Interrupting(rows)
    tier.blocks = {key(50): content(50, ROW).tobytes()}
    tier.is_silent = True

    def end_soon() -> None:
        raise TimedOut("the program is to end", 0.1)

    with TierChain(pool, rows, [tier], spare=1, timeout=0.5) as chain:
        one = Engine(rows, pool, chain)
        one.compute(*range(7))
        with handling(end_soon):
            tier.calls = (kind,)
            if kind == "load":
                one.find(50, timeout=0)
            else:
                one.compute(7)
        tier.calls = ()
        one.compute(*range(100, 107))
        tier.speak()
        for number in range(100, 107):
            if pool.has([key(number)])[0]:
                assert one.find(number, timeout=0) == 1
        for each, stored in tier.blocks.items():
            assert stored == content(int.from_bytes(each, "big"), ROW).tobytes()
        until(lambda: (poll_of(chain).spare, pool.statistics().reserved) == (1, 1), "idle")


def test_a_handler_that_calls_the_chain_does_not_wait() -> None:
    """In the middle of one of its calls: it gets what is there, at once, and costs no time."""
    rows = np.zeros((8, ROW), np.uint8)
    pool = BlockPool(8, "lru")
    tier = Interrupting(rows)
    tier.blocks = {key(50): content(50, ROW).tobytes()}
    seen: list[object] = []

    with TierChain(pool, rows, [tier], spare=1) as chain:
        one = Engine(rows, pool, chain)

        def work() -> None:
            seen.append(one.find(50, 3, timeout=20))
            chain.prefetch([key(60)])
            one.compute(3)
            for call in (partial(chain.forget, [key(4)]), chain.clear):
                with pytest.raises(ConcurrentUse):
                    call()

        begun, cpu = time.monotonic(), time.process_time()
        with handling(work):
            tier.calls = ("has",)
            assert one.find(50) == 1
            tier.calls = ()
        assert_in_time(5, begun)
        assert time.process_time() - cpu < 2
        assert seen == [0]
        assert one.find(3, timeout=0) == 1


def test_a_close_in_the_middle_of_a_call_is_not_the_end() -> None:
    """The interrupted call may be about to begin a store: the rows are not the caller's yet."""
    with in_memory(blocks=8, spare=2) as (one, tier):
        one.compute(*range(6))
        ends: list[str] = []

        def close_and_deny(_: bytes) -> bool:
            if not ends:
                with pytest.raises(TimedOut, match="close it again"):
                    one.chain.close()
                ends.append("refused")
            return False

        tier.knows = close_and_deny
        assert one.compute(6) == [6]
        assert ends == ["refused"]
        one.chain.close()
        with pytest.raises(Closed):
            one.chain.poll()


def test_new_weights_while_another_thread_works() -> None:
    """It would load an old block from one tier, and evict it to another that is empty already."""
    with in_memory(blocks=8, spare=2, tiers=2) as (one, first, second):
        for tier in (first, second):
            tier.blocks = {key(1): content(1, ROW).tobytes()}
        clear = second.clear

        def late() -> None:
            def work() -> None:
                one.find(1)
                one.compute(*range(20, 30))

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            clear()

        second.clear = late
        one.chain.clear()
        assert one.find(1) == 0
        assert key(1) not in first.blocks


def test_calls_beside_threads_that_have_keys_forgotten() -> None:
    """Some wait for the tier meanwhile, another has one key after the other forgotten."""
    interval = sys.getswitchinterval()
    waits, over = threading.Semaphore(0), threading.Event()
    with in_memory(blocks=256) as (one, tier), ThreadPoolExecutor(9) as threads:
        forget = tier.forget

        def late(keys: Sequence[bytes]) -> None:
            if keys[0] != key(1):
                waits.release()
                over.wait(PATIENCE)
            forget(keys)

        def forget_again() -> None:
            while not over.is_set():
                one.chain.forget([key(1)])

        tier.forget = late
        each = [threads.submit(one.chain.forget, [key(number)]) for number in range(10, 18)]
        for _ in each:
            assert waits.acquire(timeout=PATIENCE)
        each.append(threads.submit(forget_again))
        sys.setswitchinterval(1e-6)
        try:
            for _ in range(150):
                one.chain.prefetch([key(number) for number in range(100, 200)])
        finally:
            sys.setswitchinterval(interval)
            over.set()
        for one_of in each:
            one_of.result(PATIENCE)


def test_a_tier_that_raises_does_not_keep_the_others_from_forgetting() -> None:
    with in_memory(tiers=2) as (one, first, second):
        second.blocks = {key(1): content(1, ROW).tobytes()}
        first.raises["clear"] = RuntimeError("it is broken")
        with pytest.raises(RuntimeError):
            one.chain.clear()
        assert second.blocks == {}


def test_a_closed_tier_with_a_call_that_has_failed() -> None:
    with in_memory(blocks=8, spare=2) as (one, tier):
        one.compute(*range(6))
        tier.raises["store"] = RuntimeError("it is broken")
        one.compute(20)
        for call in ("poll", "store", "load", "has"):
            tier.raises[call] = Closed("this tier is closed")
        begun = time.monotonic()
        one.chain.close(5)
        assert_in_time(2, begun)


def test_a_closed_tier_without_a_deadline_finishes_its_jobs() -> None:
    """Ends what it was asked for, also where the call has failed."""
    with in_memory(blocks=8, spare=2, timeout=1e9) as (one, tier):
        one.compute(*range(6))
        tier.raises["store"] = RuntimeError("it is broken")
        one.compute(20)
        for call in ("poll", "store", "load", "has"):
            tier.raises[call] = Closed("this tier is closed")
        one.chain.close(PATIENCE)


def test_a_key_that_comes_twice_is_no_fault_of_a_disk(tmp_path: Path) -> None:
    rows = np.zeros((8, ROW), np.uint8)
    pool = BlockPool(8, "lru")
    with (
        DiskTier(tmp_path / "disk", rows, "1MiB", policy="lru") as disk,
        TierChain(pool, rows, [disk], spare=2) as chain,
    ):
        one = Engine(rows, pool, chain)
        for number in range(12):
            one.compute(number)
            until(lambda: not poll_of(chain).storing, "stored")
        assert one.find(1, 1, 2, 1) == 4
        assert not chain.statistics().tiers[0].is_left_out
        chain.forget([key(1), key(1)])
        assert disk.has([key(1)]) == [False]


def test_more_than_half_of_the_pool_can_be_loaded() -> None:
    with in_memory(blocks=16, spare=1) as (one, tier):
        tier.blocks = {key(number): content(number, ROW).tobytes() for number in range(12)}
        assert one.find(*range(12)) == 12
        tier.is_silent = True
        for number in range(100, 140, 2):
            tier.knows = lambda _: True
            one.chain.prefetch([key(number), key(number + 1)])
        assert one.chain.statistics().loading <= 8


def test_a_chain_that_cannot_be_made_takes_no_blocks(tmp_path: Path) -> None:
    rows = np.zeros((8, ROW), np.uint8)
    pool = BlockPool(8, "lru")
    disk = DiskTier(tmp_path / "disk", rows, "1MiB")
    disk.close()
    with pytest.raises(Closed):
        TierChain(pool, rows, [disk], spare=4)
    assert pool.statistics().reserved == 0
    with TierChain(pool, rows, [MemoryTier(rows)]):
        pass


@pytest.mark.parametrize(
    "wrong", ["short", "twice", "never", "raises", "none", "no flags", "no list"]
)
def test_reports_that_are_none(wrong: str) -> None:
    """The calls end, nothing raises, no block is lost, and no time is spent."""
    with in_memory(blocks=8, spare=2, timeout=0.3) as (one, tier):
        poll = tier.poll

        def lie() -> list[Done]:
            if wrong == "raises":
                raise RuntimeError("it is broken")
            done = poll()
            if wrong == "never":
                return []
            if wrong == "twice":
                return done * 2
            if wrong == "none":
                return [None for _ in done]  # type: ignore[misc]
            if wrong == "no flags":
                return [replace(each, ok=None) for each in done]  # type: ignore[arg-type]
            if wrong == "no list":
                return None  # type: ignore[return-value]
            return [replace(each, ok=each.ok[:-1]) for each in done]

        tier.poll = lie
        tier.blocks = {key(50): content(50, ROW).tobytes()}
        cpu = time.process_time()
        one.compute(*range(6))
        one.compute(6)
        assert one.find(50, timeout=2) == (wrong == "twice")
        assert time.process_time() - cpu < 1
        tier.poll = poll
        until(lambda: not poll_of(one.chain).loading + poll_of(one.chain).storing, "idle")
        assert (poll_of(one.chain).spare, one.pool.statistics().reserved) == (2, 2)


def test_rows_are_a_tiers_until_it_was_polled_after_the_deadline() -> None:
    """A disk tier ends what is late when it is polled, and writes to the rows until then."""
    with in_memory(blocks=8, spare=1, timeout=0.1) as (one, tier):
        tier.blocks = {key(50): content(50, ROW).tobytes()}
        tier.is_silent = True
        one.find(50, timeout=0)
        tier.raises["poll"] = RuntimeError("a handler raises")
        one.chain.poll()
        time.sleep(0.1 + 1.2)  # the deadline, and a little more than what a report may be late by
        one.chain.poll()
        assert one.chain.statistics().loading == 1
        one.compute(*range(7))
        tier.speak()
        assert one.find(*range(6), timeout=0) == 6
        del tier.raises["poll"]
        until(lambda: poll_of(one.chain).loading == 0, "ended")
    assert one.pool.statistics().reserved == 0


def test_a_deadline_begins_with_the_call() -> None:
    """Not with the search in the tiers, which may have taken longer."""
    with in_memory(blocks=8, spare=2, timeout=0.1) as (one, tier):
        one.compute(*range(6))
        tier.is_silent = True

        def knows(_: bytes) -> bool:
            time.sleep(1.5)
            return False

        tier.knows = knows
        one.compute(20)
        assert poll_of(one.chain).storing == 1
        tier.speak()
        until(lambda: poll_of(one.chain).storing == 0, "stored")
        assert [each.stored for each in one.chain.statistics().tiers] == [1]


def test_waiting_beside_a_tier_that_cannot_be_polled_costs_no_time() -> None:
    with in_memory(blocks=8, spare=2, timeout=0.1) as (one, tier):
        tier.blocks = {key(50): content(50, ROW).tobytes()}
        tier.is_silent = True
        one.find(50, timeout=0)
        time.sleep(1.2)
        tier.raises["poll"] = RuntimeError("it is broken")
        cpu = time.process_time()
        with pytest.raises(TimedOut):
            one.chain.close(2.5)
        assert time.process_time() - cpu < 0.3


def test_a_tier_that_answers_in_numpy() -> None:
    with in_memory(blocks=8, spare=2) as (one, tier):
        tier.blocks = {key(0): content(0, ROW).tobytes()}
        tier.knows = lambda each: np.bool_(each in tier.blocks)
        for number in range(8):
            one.compute(number)
        assert tier.asked == [("store", [key(1)])]


def test_many_spare_blocks_cost_no_time() -> None:
    """The time of a report does not grow with what else is under way."""
    with in_memory(blocks=9000, spare=4000) as (one, tier):
        tier.is_silent = True
        one.rows[:] = 0
        for first in range(0, 9000, 8):
            with one.pool.reserve([key(number) for number in range(first, first + 8)]) as new:
                new.commit()
        assert one.chain.statistics().storing > 3000
        tier.speak()
        begun = time.process_time()
        one.chain.poll()
        assert time.process_time() - begun < 1


# New weights --------------------------------------------------------------------------------------


class Replica(Engine):
    """One of several engines that share a folder, and compute blocks with weights of a version."""

    def __init__(self, folder: Path, own: str, stack: contextlib.ExitStack) -> None:
        rows = np.zeros((16, ROW), np.uint8)
        pool = BlockPool(16, "lru")
        self.disk = stack.enter_context(DiskTier(folder, rows, "1MiB", policy="lru", opener=own))
        self.others = stack.enter_context(ReplicaTier(folder, rows, own=own))
        chain = stack.enter_context(TierChain(pool, rows, [self.disk, self.others]))
        super().__init__(rows, pool, chain)
        self.weights = 1

    def answer(self, number: int) -> int:
        """Returns the weights that the block was computed with."""
        with self.chain.fetch([key(number)]) as pin:
            if len(pin.ids):
                return int(self.rows[pin.ids[0], 0])
        with self.pool.reserve([key(number)]) as new:
            for _, row in new:
                self.rows[row] = self.weights
            new.commit()
        assert self.chain.flush(PATIENCE)
        return self.weights

    def update(self) -> None:
        self.weights += 1
        self.chain.clear(epoch=self.weights)


def test_a_block_of_old_weights_is_found_by_nobody_with_new_ones(tmp_path: Path) -> None:
    """Two replicas get new weights one after the other; what the second stores in between with
    its old ones, the first never uses."""
    with contextlib.ExitStack() as stack:
        first, second = (Replica(tmp_path, own, stack) for own in ("0", "1"))
        assert (first.answer(1), second.answer(2)) == (1, 1)
        first.update()
        assert second.answer(0) == 1
        until(lambda: first.others.has([key(0)]) != [None], "it has looked at the folder")
        assert first.answer(0) == 2
        second.update()
        assert (first.answer(0), second.answer(0), second.answer(2)) == (2, 2, 2)


def test_an_epoch_lasts_for_a_restart(tmp_path: Path) -> None:
    """Blocks of the same epoch are found again, those of another are not."""
    for epoch, found in (("1", 0), ("1", 4), ("2", 0), (b"1", 4)):
        rows = np.zeros((16, ROW), np.uint8)
        pool = BlockPool(16, "lru")
        with (
            DiskTier(tmp_path, rows, "1MiB", policy="lru") as disk,
            TierChain(pool, rows, [disk]) as chain,
        ):
            one = Engine(rows, pool, chain)
            chain.set_epoch(epoch)
            assert one.find(0, 1, 2, 3) == found
            one.compute(0, 1, 2, 3)


def test_a_chain_whose_tier_has_no_epochs_changes_nothing() -> None:
    with in_memory() as (one, _):
        one.compute(0)
        with pytest.raises(Unsupported, match="a MemoryTier has no epochs"):
            one.chain.clear(epoch=1)
        with pytest.raises(InvalidType, match="epoch must be"):
            one.chain.clear(epoch=1.5)
        assert one.find(0) == 1


# What the pool has at the end --------------------------------------------------------------------


def test_a_clean_end_keeps_the_pool(tmp_path: Path) -> None:
    """Blocks in the pool when a chain was closed are found after a restart."""
    for found in (0, 12):
        rows = np.zeros((16, ROW), np.uint8)
        pool = BlockPool(16, "lru")
        with (
            DiskTier(tmp_path / "disk", rows, "4MiB", policy="lru") as disk,
            TierChain(pool, rows, [disk], spare=4) as chain,
        ):
            one = Engine(rows, pool, chain)
            assert one.find(*range(12)) == found
            if not found:
                one.compute(*range(12))


def test_a_flush_stores_the_pool_and_counts_no_access() -> None:
    """Also what the admission would decline, and nothing twice."""
    with in_memory(blocks=200, spare=8, admission="second") as (one, tier):
        assert one.compute(*range(150)) == [*range(150)]
        before = one.pool.statistics()
        assert one.chain.flush(PATIENCE)
        assert {*tier.blocks} == {key(number) for number in range(150)}
        assert one.pool.statistics() == before
        assert one.chain.statistics().spare == 8
        asked = len(tier.asked)
        assert one.chain.flush(PATIENCE)
        assert len(tier.asked) == asked


def test_a_flush_that_has_no_time_keeps_its_rows() -> None:
    """Blocks that are still being stored are not evicted; the next flush waits for them."""
    with in_memory(blocks=8, spare=2) as (one, tier):
        one.compute(*range(6))
        tier.is_silent = True
        assert not one.chain.flush(0)
        assert one.pool.statistics().pinned == 6
        assert one.compute(6, 7) == []
        tier.is_silent = False
        tier.speak()
        assert one.chain.flush(PATIENCE)
        assert one.pool.statistics().pinned == 0
        assert one.compute(6, 7) == [6, 7]


def test_a_flush_says_that_a_tier_has_failed(warnings: Callable[[], list[str]]) -> None:
    """By False, and `close` by a line of the log."""
    with in_memory(blocks=8, spare=2) as (one, tier):
        one.compute(*range(6))
        tier.raises["store"] = OSError("no")
        assert not one.chain.flush(PATIENCE)
        one.chain.close()
    assert "a tier chain was closed before every block of its pool was stored" in warnings()


def test_a_flush_of_a_chain_that_only_reads_ends_at_once(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    """There is nothing to store, so it ends at once, as `close` does."""
    with engine(lambda rows: [ReplicaTier(tmp_path, rows)], blocks=8, spare=2) as one:
        one.compute(*range(6))
        assert one.chain.flush(0)
        assert one.pool.statistics().pinned == 0
        one.chain.close(0)
    assert warnings() == []


def test_a_flush_ends_when_another_thread_closes_the_chain() -> None:
    """The rows are the caller's from then on: no store of them begins."""
    with in_memory(blocks=300, spare=2) as (one, tier):
        one.compute(*range(290))
        tier.is_silent = True
        flush = Aside(lambda: one.chain.flush())
        until(lambda: len(tier.asked) == 2, "it waits")
        with pytest.raises(TimedOut):
            one.chain.close(0, store=False)
        tier.is_silent = False
        tier.speak()
        assert not flush.result()
        one.chain.close()
        assert len(tier.asked) == 2
        assert one.pool.statistics().pinned == 0


@pytest.mark.parametrize("how", ["close", "exception"])
def test_a_chain_can_close_without_storing(how: str) -> None:
    with contextlib.suppress(ZeroDivisionError), in_memory(blocks=8, spare=2) as (one, tier):
        one.compute(*range(6))
        if how == "exception":
            raise ZeroDivisionError
        one.chain.close(store=False)
    assert tier.blocks == {}


def test_lost_blocks_are_one_line_and_a_counter(warnings: Callable[[], list[str]]) -> None:
    """In the statistics of chain and pool, and for observers."""
    with in_memory(blocks=8, spare=1) as (one, tier):
        tier.is_silent = True
        for first in range(0, 40, 4):
            one.compute(*range(first, first + 4))
        dropped = one.chain.statistics().dropped
        assert dropped == one.pool.statistics().dropped > 8
        mine = [each for each in inspect.segments() if os.getpid() in each.pids]
        assert dropped in [each.counters.get("dropped") for each in mine]
        lines = [line for line in warnings() if "lost" in line]
        assert len(lines) == 1
        assert "its 1 spare blocks" in lines[0]


# Tiers that do not know yet -----------------------------------------------------------------------


@pytest.mark.parametrize("pause", [0.0, 0.001, 0.005, 0.03])
def test_behind_a_server_blocks_are_kept_as_without(pause: float) -> None:
    """An engine that never waits: it fetches, and computes what is not there."""

    class Slow(MemoryTransport):
        pass

    Slow.pause = pause
    rows = np.zeros((64, ROW), np.uint8)
    pool = BlockPool(64, "lru")
    with (
        tier_in_memory(rows, Slow) as server,
        TierChain(pool, rows, [server]) as chain,
    ):
        one = Engine(rows, pool, chain)
        assert one.find(*range(8), timeout=0) == 0
        assert one.compute(*range(8)) == [*range(8)]
        assert one.find(*range(8), timeout=0) == 8


def test_keys_that_no_tier_has_evict_nothing() -> None:
    """As long as a tier does not know, nothing is reserved for what it may have."""
    with in_memory(blocks=64) as (one, tier):
        one.compute(*range(40))
        tier.knows = lambda _: None
        assert one.find(*range(100, 150), timeout=0) == 0
        assert one.pool.statistics().evicted == 0
        assert tier.asked == []
        assert one.find(*range(40), timeout=0) == 40


def test_a_block_is_loaded_once_the_tier_says_that_it_has_it() -> None:
    """Without another call but `poll`, and a fetch waits for the answer."""
    rows = np.zeros((16, ROW), np.uint8)

    class Slow(MemoryTransport):
        pause = 0.02

    with tier_in_memory(rows, Slow) as server:
        for number in range(4):
            rows[number] = content(number, ROW)
        server.store([key(number) for number in range(4)], [*range(4)])
        assert server.drain(20)
        server.poll()
        time.sleep(1.1)  # as long as an answer is believed
        pool = BlockPool(16, "lru")
        with TierChain(pool, rows, [server]) as chain:
            one = Engine(rows, pool, chain)
            chain.prefetch([key(number) for number in range(2)])
            until(lambda: poll_of(chain).loaded == 2, "loaded")
            assert one.find(0, 1, timeout=0) == 2
            assert one.find(0, 1, 2, 3, 9, timeout=20) == 4


def test_a_caller_that_computes_a_block_wins_over_its_load() -> None:
    with in_memory(blocks=16) as (one, tier):
        tier.blocks = {key(1): content(1, ROW).tobytes()}
        tier.is_silent = True
        assert one.find(1, timeout=0) == 0
        assert one.compute(1) == [1]
        tier.speak()
        assert poll_of(one.chain).loading == 0
        assert one.find(1, timeout=0) == 1
    assert one.pool.statistics().reserved == 0
