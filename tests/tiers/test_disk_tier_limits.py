"""A disk tier's quota and age limit, and the order of eviction after a restart."""

from __future__ import annotations

import random
import shutil
import signal
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import InvalidArgument, InvalidType
from memlane._native import crc32c
from memlane.cli.tier import pairs_in
from memlane.tiers import DiskTier
from memlane.tiers.conformance import content, key, wait_for
from memlane.tiers.tier import Namespace
from tests.support import Link, private_shm, start, unshare_refusal, until
from tests.support.disk_tiers import capacity_of, check_all, tier_on

ROW = 4096


@pytest.fixture
def rows() -> Any:
    return np.zeros((2, ROW), np.uint8)


def store(tier: DiskTier, rows: Any, *numbers: int) -> None:
    for number in numbers:
        rows[0] = content(number, ROW)
        assert wait_for(tier, tier.store([key(number)], [0])).ok.all()


def there(tier: DiskTier, count: int = 40) -> list[int]:
    has = tier.has([key(number) for number in range(count)])
    return [number for number in range(count) if has[number]]


def blocks(folder: Path) -> dict[str, int]:
    (pair,) = pairs_in(folder)
    return {each.namespace: each.blocks for each in pair.namespaces}


def name(namespace: str) -> str:
    return Namespace(namespace).id.hex()


# The order of eviction ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "tuned"])
def test_what_was_used_outlives_a_restart(tmp_path: Path, rows: Any, policy: Any) -> None:
    """Not what was stored last."""
    with tier_on(tmp_path, rows, capacity=10, policy=policy) as tier:
        store(tier, rows, *range(10))
        assert check_all(tier, rows, [0, 1, 2]) == 3
        assert check_all(tier, rows, [0, 1, 2]) == 3
    with tier_on(tmp_path, rows, capacity=10, policy=policy) as tier:
        store(tier, rows, *range(10, 15))
        assert {0, 1, 2} <= {*there(tier)}


def test_a_key_that_was_stored_again_is_there_once(tmp_path: Path, rows: Any) -> None:
    """However often it was used before."""
    with tier_on(tmp_path, rows, capacity=4) as tier:
        store(tier, rows, 0, 1)
        assert check_all(tier, rows, [0, 0, 0]) == 3
        tier.forget([key(0)])
        store(tier, rows, 0)
    with tier_on(tmp_path, rows, capacity=4) as tier:
        assert there(tier) == [0, 1]
        assert check_all(tier, rows, [0, 1]) == 2


def killed(link: Link, folder: Path) -> None:
    """Role: uses blocks, and is killed."""
    rows = np.zeros((2, ROW), np.uint8)
    tier = tier_on(folder, rows, capacity=10)
    store(tier, rows, *range(10))
    assert check_all(tier, rows, [0, 1]) == 2
    link.tell()
    signal.pause()


def test_a_kill_loses_uses_and_no_block(tmp_path: Path, rows: Any) -> None:
    """Blocks are evicted in the order of the stores then."""
    peer = start(killed, tmp_path)
    peer.hear()
    peer.kill()
    with tier_on(tmp_path, rows, capacity=10) as tier:
        assert there(tier) == [*range(10)]
        store(tier, rows, 10)
        assert there(tier) == [*range(1, 11)]


@pytest.mark.parametrize("damage", ["gone", "empty", "noise"])
def test_uses_that_are_damaged(tmp_path: Path, rows: Any, damage: str) -> None:
    """Cost the order of eviction at most."""
    with tier_on(tmp_path, rows, capacity=10) as tier:
        store(tier, rows, *range(10))
        assert check_all(tier, rows, range(10)) == 10
    file = tmp_path / "0.uses"
    if damage == "gone":
        file.unlink()
    else:
        noise = random.Random(1).randbytes(file.stat().st_size)
        file.write_bytes(b"" if damage == "empty" else file.read_bytes()[:16] + noise[16:])
    for policy in ("lru", "tuned"):
        with tier_on(tmp_path, rows, capacity=10, policy=policy) as tier:
            assert check_all(tier, rows, range(10)) == 10


def test_uses_are_seen_from_outside(tmp_path: Path, rows: Any) -> None:
    with tier_on(tmp_path, rows, capacity=10, namespace="a") as tier:
        store(tier, rows, 0, 1)
        assert check_all(tier, rows, [0, 0, 1]) == 3
    (pair,) = pairs_in(tmp_path)
    (of,) = pair.namespaces
    assert of.hits == 3
    assert of.newest is not None
    assert of.last_use is not None
    assert of.newest >= of.last_use


# Behind the magic and the CRC: what was chosen, of how many, its share, and a score of each.
LEARNED = struct.Struct("<4xII8d")


def learned(file: Path) -> tuple[float, ...]:
    """Returns what the tuner has left."""
    return LEARNED.unpack_from(file.read_bytes(), 12)


def teach(file: Path, *state: float) -> None:
    """Writes it, with a right CRC."""
    data = bytearray(file.read_bytes())
    LEARNED.pack_into(data, 12, *state)
    struct.pack_into("<I", data, 8, crc32c(bytes(data[12 : 12 + LEARNED.size])))
    file.write_bytes(data)


def test_what_tuned_has_learned_outlives_a_restart(tmp_path: Path, rows: Any) -> None:
    """If it can be; a state that no tuner has written is passed over."""
    state = (2, 7, 0.0, 1.0, 2.0, 9.0, 1.0, 1.0, 1.0, 1.0)
    for number, taught, kept in (
        (0, None, 0),
        (1, state, 2),
        (2, (9, *state[1:]), 0),
        (3, (2, 7, 0.0, float("nan"), *state[4:]), 0),
    ):
        if taught is not None:
            teach(tmp_path / "0.uses", *taught)
        with tier_on(tmp_path, rows, capacity=10, policy="tuned") as tier:
            wait_for(tier, tier.store([key(number)], [0]))
        assert learned(tmp_path / "0.uses")[0] == kept
        if kept:
            assert learned(tmp_path / "0.uses") == state


# The quota ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("quota", [0.4, capacity_of(10, ROW) * 4 // 10 + ROW // 2])
def test_a_namespace_beyond_its_quota_evicts_its_own(
    tmp_path: Path, rows: Any, quota: float
) -> None:
    """The blocks of the other namespace stay, whichever runs."""
    for round_ in range(2):
        for namespace in ("a", "b"):
            with tier_on(tmp_path, rows, 10, namespace=namespace, quota=quota) as tier:
                assert tier.statistics().slots == 4
                kept = [6, 7, 8, 9] if round_ else []
                assert there(tier) == kept
                assert check_all(tier, rows, kept) == len(kept)
                store(tier, rows, *range(10))
                assert there(tier) == [6, 7, 8, 9]
    assert blocks(tmp_path) == {name("a"): 4, name("b"): 4}


def test_a_quota_that_becomes_smaller(tmp_path: Path, rows: Any) -> None:
    """The blocks that were used last are kept; the others are gone, also without a quota again."""
    with tier_on(tmp_path, rows, 10) as tier:
        store(tier, rows, *range(10))
        assert check_all(tier, rows, [0, 1]) == 2
    with tier_on(tmp_path, rows, 10, quota=0.4) as tier:
        assert there(tier) == [0, 1, 8, 9]
        store(tier, rows, 20)
        assert there(tier) == [0, 1, 9, 20]
    with tier_on(tmp_path, rows, 10) as tier:
        assert there(tier) == [0, 1, 9, 20]
        assert check_all(tier, rows, [0, 1, 9, 20]) == 4
        store(tier, rows, *range(30, 36))
        assert there(tier) == [0, 1, 9, 20, *range(30, 36)]


def test_lives_with_quotas_are_dictionaries(tmp_path: Path, rows: Any) -> None:
    """Random lives of three namespaces, each with its quota: none has more, and none takes a
    block of another."""
    chance = random.Random(55)
    most = {"a": 5, "b": 4, "c": 3}
    known: dict[str, dict[int, None]] = {each: {} for each in most}  # the last used last
    for _ in range(12):
        namespace = chance.choice("abc")
        mine = known[namespace]
        quota = most[namespace] / 12
        with tier_on(tmp_path, rows, 12, namespace=namespace, quota=quota + 0.01) as tier:
            assert there(tier) == sorted(mine)
            for _ in range(8):
                number = chance.randrange(12)
                if chance.random() < 0.5:
                    store(tier, rows, number)
                    mine.pop(number, None)
                    mine[number] = None
                    if len(mine) > most[namespace]:
                        del mine[next(iter(mine))]
                elif chance.random() < 0.2:
                    tier.forget([key(number)])
                    mine.pop(number, None)
                elif check_all(tier, rows, [number]):
                    mine.pop(number)
                    mine[number] = None
                assert there(tier) == sorted(mine)
        expected = {name(each): len(held) for each, held in known.items() if held}
        assert blocks(tmp_path) == expected


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"quota": 1.5}, InvalidArgument),
        ({"quota": 0.0}, InvalidArgument),
        ({"quota": 100}, InvalidArgument),
        ({"quota": "much"}, InvalidArgument),
        ({"quota": [1]}, InvalidType),
        ({"ttl": 0}, InvalidArgument),
        ({"ttl": -1}, InvalidArgument),
        ({"ttl": float("inf")}, InvalidArgument),
        ({"ttl": "1 h"}, InvalidType),
    ],
)
def test_limits_that_are_refused(
    tmp_path: Path, rows: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        tier_on(tmp_path / "kv", rows, 10, **options)
    assert not (tmp_path / "kv").exists()


def share_of_a_small_disk(_link: Link) -> list[int]:
    """Role: a share is one of what the disk has, also if that is less than was asked for."""
    rows = np.zeros((2, ROW), np.uint8)
    folder = Path("/dev/shm/kv")
    for namespace in ("a", "b"):
        with tier_on(folder, rows, 1000, namespace=namespace, quota=0.5, margin=0) as tier:
            store(tier, rows, *range(100))
            slots = tier.statistics().slots
    with tier_on(folder, rows, 1000, namespace="a", quota=0.5, margin=0) as tier:
        return [slots, len(there(tier, 100))]


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
def test_a_share_of_a_disk_that_is_smaller_than_the_capacity() -> None:
    slots, left = start(share_of_a_small_disk, method="spawn", command=private_shm("1m")).result()
    assert 100 < slots < 128
    assert left == 100


# The age limit -----------------------------------------------------------------------------------


def test_a_block_that_is_too_old_is_a_miss(tmp_path: Path, rows: Any) -> None:
    """For every call; and its slot is free for others, also of what nobody asks for."""
    with tier_on(tmp_path, rows, 10, ttl=1) as tier:
        store(tier, rows, *range(9))
        until(lambda: not tier.has([key(0)])[0])
        with tier.hold([key(0)]) as held:
            assert held.there == [False]
        assert not wait_for(tier, tier.load([key(0)], [1])).ok.any()
        until(lambda: tier.statistics().blocks == 0)
        tier.drain()
        assert blocks(tmp_path) == {}
        assert tier.statistics().evicted == 0
    with tier_on(tmp_path, rows, 10, ttl=3600) as tier:
        store(tier, rows, 0)  # anew
        assert check_all(tier, rows, [0]) == 1


def test_a_block_that_is_held_is_there_until_it_is_released(tmp_path: Path, rows: Any) -> None:
    """Another tier tells when the block of this one is too old."""
    with (
        tier_on(tmp_path, rows, 10, ttl=1) as tier,
        tier_on(tmp_path, rows, 10, opener="b", ttl=1) as later,
    ):
        store(tier, rows, 0)
        while not (held := tier.hold([key(0)])).there[0]:  # on a machine that is late
            store(tier, rows, 0)
        with held:
            store(later, rows, 0)
            until(lambda: not later.has([key(0)])[0])
            assert tier.has([key(0)]) == [True]
            assert wait_for(tier, tier.load([key(0)], [1])).ok.all()
        until(lambda: not tier.has([key(0)])[0])


def test_blocks_age_while_the_tier_is_closed(tmp_path: Path, rows: Any) -> None:
    """And what is not too old for another limit is there."""
    with tier_on(tmp_path / "kv", rows, 10) as tier:
        store(tier, rows, 1)
    shutil.copytree(tmp_path / "kv", tmp_path / "later")
    with tier_on(tmp_path / "kv", rows, 10, ttl=1) as tier:
        until(lambda: not tier.has([key(1)])[0])
    with tier_on(tmp_path / "later", rows, 10, ttl=1) as tier:
        assert there(tier) == []
    with tier_on(tmp_path / "later", rows, 10, ttl=3600) as tier:
        assert there(tier) == []  # it was erased
