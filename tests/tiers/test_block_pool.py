"""BlockPool: who finds which key in which block, and when a block is free."""

import gc
import os
import resource
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import (
    ConcurrentUse,
    InvalidArgument,
    InvalidType,
    OutOfMemory,
    Unsupported,
    WrongProcess,
)
from memlane.tiers import BlockPool
from memlane.tiers.pool import PolicyName
from tests.support.limits import limiting

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
POLICIES: list[PolicyName] = ["lru", "arc", "s3fifo", "tuned"]


def keys(*numbers: int) -> list[bytes]:
    return [f"key {number}".encode() for number in numbers]


def store(pool: BlockPool, *numbers: int) -> dict[bytes, int]:
    with pool.reserve(keys(*numbers)) as new:
        new.commit()
        return dict(iter(new))


def found(pool: BlockPool, *numbers: int) -> list[int]:
    with pool.pin(keys(*numbers)) as pin:
        return [int(block) for block in pin.ids]


@pytest.fixture(params=POLICIES)
def pool(request: pytest.FixtureRequest) -> Iterator[BlockPool]:
    yield BlockPool(8, request.param)
    del request.node.funcargs["pool"]  # or it would keep the pool, and what observers see of it


def test_what_is_committed_is_found(pool: BlockPool) -> None:
    """Each key in the block that was reserved for it, as int32."""
    blocks = store(pool, 1, 2, 3)
    assert sorted(blocks.values()) == [0, 1, 2]
    with pool.pin(keys(1, 2, 3)) as pin:
        assert pin.ids.dtype == np.int32
        assert pin.ids.tolist() == list(blocks.values())
        assert pin.missing == []


def test_a_pin_is_the_leading_run(pool: BlockPool) -> None:
    store(pool, 1, 2, 4)
    with pool.pin(keys(1, 2, 3, 4)) as pin:
        assert len(pin.ids) == 2
        assert pin.missing == keys(3)
    assert found(pool, 3, 1) == []
    with pool.pin(keys(3, 4, 5, 3)) as pin:
        assert (len(pin.ids), pin.missing) == (0, keys(3, 5))


def test_the_missing_keys_of_a_request_and_the_blocks_reserved_for_them_belong_together(
    pool: BlockPool,
) -> None:
    """An earlier request left a block behind the first that is missing."""
    content = np.full(8, -1)
    [left] = store(pool, 2).values()
    content[left] = 2
    with pool.pin(keys(1, 2, 3)) as pin, pool.reserve(pin.missing) as new:
        for each, row in zip(pin.missing, new.ids, strict=True):
            content[row] = int(each.split()[1])
        new.commit()
    assert content[found(pool, 1, 2, 3)].tolist() == [1, 2, 3]


def test_a_skipped_key_has_no_row(pool: BlockPool) -> None:
    """The ids are as many as the keys, and that of a skipped key is an index of no buffer."""
    blocks = store(pool, 2)
    with pool.reserve(keys(1, 2, 3)) as new:
        assert new.keys == keys(1, 2, 3)
        assert (new.ids.dtype, len(new.ids), len(new)) == (np.int32, 3, 2)
        assert [*new] == [(new.keys[at], int(new.ids[at])) for at in (0, 2)]
        assert (new.skipped, new.ids[1]) == (keys(2), new.NO_BLOCK)
        rows = np.arange(8)
        with pytest.raises(IndexError):
            rows[new.ids] = 9
        with pytest.raises(IndexError):
            rows[new.ids[1]] = 9
        assert rows.tolist() == [*range(8)]
        new.commit([True, False, False])
    assert found(pool, 2, 1) == [blocks[keys(2)[0]], new.ids[0]]
    assert found(pool, 3) == []


def test_what_is_reserved_is_not_found_before_the_commit(pool: BlockPool) -> None:
    with pool.reserve(keys(1)) as new:
        assert found(pool, 1) == []
        with pool.reserve(keys(1)) as again:
            assert ([*again], again.skipped) == ([], keys(1))
        new.commit()
    assert len(found(pool, 1)) == 1


def test_what_is_not_committed_is_free_again(pool: BlockPool) -> None:
    """One by one, all, or after an error."""
    with pool.reserve(keys(1, 2, 3)) as new:
        new.commit([True, False, True])
    assert found(pool, 2) == []
    assert len(found(pool, 1)) == len(found(pool, 3)) == 1
    with pytest.raises(ZeroDivisionError), pool.reserve(keys(4, 5)):
        _ = 1 / 0
    new = pool.reserve(keys(6))
    del new
    gc.collect()
    assert found(pool, 4, 5, 6) == []
    assert pool.statistics().used == 2


def test_a_key_is_stored_once(pool: BlockPool) -> None:
    """Asked for twice, in one call or two."""
    store(pool, 1)
    with pool.reserve(keys(1, 2, 2, 3)) as new:
        assert [each for each, _ in new] == keys(2, 3)
        assert new.skipped == keys(1, 2)
        new.commit()
    assert pool.statistics().used == 3


def test_a_full_pool_evicts(pool: BlockPool) -> None:
    store(pool, *range(8))
    with pool.reserve(keys(8, 9)) as new:
        assert len(new.evicted) == len(new) == 2
        assert set(new.evicted) <= set(keys(*range(8)))
        new.commit()
    assert pool.statistics().evicted == 2
    assert pool.statistics().used == 8


def test_what_is_pinned_stays(pool: BlockPool) -> None:
    """As many as fit are reserved, the first ones first."""
    blocks = store(pool, *range(8))
    with pool.pin(keys(0, 1, 2, 3, 4, 5)):
        with pool.reserve(keys(10, 11, 12)) as new:
            assert set(new.evicted) <= set(keys(6, 7))
            assert [each for each, _ in new] + new.skipped == keys(10, 11, 12)
            assert len(new) == 2
            new.commit()
        assert found(pool, 0, 1, 2, 3, 4, 5) == list(blocks.values())[:6]
    with pool.reserve(keys(12)) as new:
        assert len(new) == 1


def test_a_block_with_two_pins_stays_until_both_are_released(pool: BlockPool) -> None:
    """It stays until the last is released; releasing twice does nothing."""
    store(pool, *range(8))
    first, second = pool.pin(keys(*range(8))), pool.pin(keys(*range(8)))
    first.release()
    first.release()
    with pool.reserve(keys(9)) as new:
        assert new.skipped == keys(9)
    second.release()
    assert pool.statistics().pinned == 0
    with pool.reserve(keys(9)) as new:
        assert [each for each, _ in new] == keys(9)


def test_a_dropped_pin_is_released(pool: BlockPool) -> None:
    store(pool, 1)
    pin = pool.pin(keys(1))
    assert pool.statistics().pinned == 1
    del pin
    gc.collect()
    assert pool.statistics().pinned == 0


@pytest.mark.parametrize("all_of_them", [False, True])
def test_forgotten_blocks_are_free_when_nobody_holds_them(
    pool: BlockPool, all_of_them: bool
) -> None:
    """A pinned one stays its holder's; a reserved one is given back by the commit."""
    store(pool, 1, 2)
    pin, new = pool.pin(keys(1)), pool.reserve(keys(3))
    pool.clear() if all_of_them else pool.forget(keys(1, 2, 3, 4))
    assert found(pool, 1, 2, 3) == []
    assert pool.statistics().used == 2
    again = store(pool, 1)
    assert not {*again.values()} & {*pin.ids.tolist(), *new.ids.tolist()}
    pin.release()
    new.commit()
    assert pool.statistics().used == 1
    assert found(pool, 3) == []
    assert found(pool, 1) == list(again.values())


def test_tails_go_before_heads() -> None:
    """The last block of a prefix is evicted first."""
    pool = BlockPool(4, "lru")
    store(pool, 1, 2, 3, 4)
    found(pool, 1, 2, 3, 4)
    with pool.reserve(keys(5, 6)) as new:
        assert new.evicted == keys(4, 3)


def test_a_touch_is_an_access() -> None:
    pool = BlockPool(2, "lru")
    store(pool, 1)
    store(pool, 2)
    pool.touch(keys(1))
    with pool.reserve(keys(3)) as new:
        assert new.evicted == keys(2)


def test_statistics_count_hits_and_evictions() -> None:
    pool = BlockPool(4, "lru")
    store(pool, 1, 2, 4)
    with pool.pin(keys(1, 2, 3, 4)), pool.reserve(keys(5)):
        now = pool.statistics()
    assert (now.policy, now.blocks, now.used, now.reserved, now.pinned) == ("lru", 4, 4, 1, 2)
    assert (now.accesses, now.hits, now.misses, now.prefix_hits) == (4, 3, 1, 2)
    assert (now.stored, now.evicted, now.declined) == (3, 0, 0)


def test_a_tuned_pool_learns_to_decline() -> None:
    """Most keys come once: then those that nobody has asked for before are not worth their room."""
    pool, last = BlockPool(200, "tuned"), 0
    for number in range(3000):  # it takes a while to learn: longer where its thread waits
        wanted = keys(*range(150), *range(1000 * number + 1000, 1000 * number + 1400))
        with pool.pin(wanted) as pin, pool.reserve(pin.missing) as new:
            new.commit()
        if number % 20 == 19:
            before, last = last, pool.statistics().hits
            if last - before > 0.8 * 20 * 150:
                break
    else:
        pytest.fail(f"at last it hits {last - before} of 3000")


def test_a_slot_of_a_tuned_pool_costs_less_than_400_bytes() -> None:
    """With all lists of evicted keys and all shadows full, in a process that does nothing else."""
    blocks = 60_000
    command = [sys.executable, "-m", "benchmarks.tiers.memory", "--one"]
    command += ["--policy", "tuned", "--blocks", str(blocks)]
    taken = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=ROOT).stdout
    assert 50 * blocks < int(taken) < 400 * blocks


def test_a_forecast_says_what_more_blocks_would_hit() -> None:
    """Ten keys in turn: nothing of them stays in eight blocks, and all in ten."""
    pool = BlockPool(8, "lru")
    assert pool.forecast(0).accesses == pool.forecast(2).accesses == 0
    for _ in range(5):
        for number in range(10):
            pool.touch(keys(number))
    assert (pool.forecast(0).accesses, pool.forecast(0).hits) == (50, 0)
    assert (pool.forecast(2).hits, pool.forecast(2).prefix_hits) == (40, 40)


@pytest.mark.parametrize("more", [-1, 1.5, 1 << 31, True])
def test_a_bad_forecast_is_refused(pool: BlockPool, more: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="more_blocks"):
        pool.forecast(more)


@pytest.mark.parametrize(
    ("asked", "error"),
    [(["text"], InvalidType), ([b""], InvalidArgument), ([b"x" * 256], InvalidArgument)],
)
def test_a_bad_key_changes_nothing(
    pool: BlockPool, asked: Sequence[Any], error: type[Exception]
) -> None:
    store(pool, 1)
    before = pool.statistics()
    for call in (pool.pin, pool.reserve, pool.touch, pool.forget):
        with pytest.raises(error, match="a key must"):
            call([*keys(1, 2), *asked])
    assert pool.statistics() == before


@pytest.mark.parametrize("asked", [None, 7])
def test_keys_that_are_no_sequence(pool: BlockPool, asked: Any) -> None:
    for call in (pool.pin, pool.reserve, pool.has, pool.touch, pool.forget):
        with pytest.raises(InvalidType, match="keys must be a sequence"):
            call(asked)


def test_a_subclass_of_bytes_is_its_bytes(pool: BlockPool) -> None:
    """No code of its own runs."""

    class Odd(bytes):
        def __hash__(self) -> int:
            raise AssertionError

    store(pool, 1)
    with pool.pin([Odd(b"key 1")]) as pin:
        assert len(pin.ids) == 1


def test_keys_of_any_length_are_told_apart(pool: BlockPool) -> None:
    """Also if they begin alike."""
    asked = [b"k", b"k" * 20, b"k" * 36, b"k\0", b"k" * 255]
    with pool.reserve(asked) as new:
        new.commit()
        blocks = new.ids.tolist()
    for key, block in zip(asked, blocks, strict=True):
        with pool.pin([key]) as pin:
            assert pin.ids.tolist() == [block]


@pytest.mark.parametrize("ok", [[True], [[True, True]], [1, 2], "yes"])
def test_a_bad_mask_changes_nothing(pool: BlockPool, ok: Any) -> None:
    with pool.reserve(keys(1, 2)) as new:
        with pytest.raises((InvalidArgument, InvalidType), match="ok must"):
            new.commit(ok)
        new.commit()
        with pytest.raises(InvalidArgument, match="committed or given back already"):
            new.commit()
    assert len(found(pool, 1, 2)) == 2


@pytest.mark.parametrize("blocks", [0, -1, 1 << 31, 1.5, "8", True])
def test_a_bad_capacity_is_refused(blocks: Any) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match="blocks"):
        BlockPool(blocks)


def test_a_capacity_beyond_the_memory_is_refused() -> None:
    with (
        limiting(resource.RLIMIT_AS, 8 << 30)("made"),
        pytest.raises(OutOfMemory, match="a pool of 2147483647"),
    ):
        BlockPool((1 << 31) - 1)


def test_a_policy_that_is_none() -> None:
    with pytest.raises(InvalidArgument, match="lru, arc, s3fifo, tuned"):
        BlockPool(8, "fifo")  # type: ignore[arg-type]


def test_a_forked_child_may_not_use_it(pool: BlockPool) -> None:
    """And releasing there what it has inherited changes nothing."""
    store(pool, 1)
    pin = pool.pin(keys(1))
    child = os.fork()
    if child == 0:
        try:
            pin.release()
            pool.pin(keys(1))
        except WrongProcess:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.statistics().pinned == 1


class Newest:
    """Evicts what came last, and declines keys that end in 9."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.keys: list[bytes] = []

    def touch(self, key: bytes) -> None:
        self.calls.append(f"touch {key!r}")

    def insert(self, key: bytes) -> bool:
        if key.endswith(b"9"):
            return False
        self.keys.append(key)
        return True

    def evict(self, incoming: bytes, is_free: Callable[[bytes], bool]) -> bytes | None:
        self.calls.append(f"evict for {incoming!r}")
        if incoming.endswith(b"9"):
            return None
        for key in reversed(self.keys):
            if is_free(key):
                self.keys.remove(key)
                return key
        return None

    def remove(self, key: bytes) -> None:
        self.keys.remove(key)

    def clear(self) -> None:
        self.keys.clear()


def test_a_policy_of_the_users_decides() -> None:
    policy = Newest()
    pool = BlockPool(2, policy)
    assert pool.statistics().policy == "Newest"
    store(pool, 1, 2)
    with pool.reserve(keys(3, 9)) as new:
        assert (new.evicted, [*new], new.skipped) == (keys(2), [(*keys(3), 1)], keys(9))
        new.commit()
    found(pool, 1)
    assert policy.calls == ["evict for b'key 3'", "evict for b'key 9'", "touch b'key 1'"]


def test_a_policy_of_the_users_hears_what_is_not_stored() -> None:
    """Given back, forgotten, or cleared."""
    policy = Newest()
    pool = BlockPool(4, policy)
    with pool.reserve(keys(1, 2)) as new:
        new.commit([True, False])
    assert policy.keys == keys(1)
    with pool.reserve(keys(3)):
        pool.forget(keys(1, 3))
    assert policy.keys == []
    store(pool, 4)
    pool.clear()
    assert policy.keys == []
    assert pool.statistics().used == 0


def test_what_is_pinned_or_reserved_is_not_free() -> None:
    """A policy that insists is refused, and nothing has changed."""

    class Stubborn(Newest):
        def evict(self, incoming: bytes, is_free: Callable[[bytes], bool]) -> bytes | None:
            assert not any(map(is_free, [*self.keys, b"unknown"]))
            return self.keys[0]

    pool = BlockPool(2, Stubborn())
    store(pool, 1)
    with pool.pin(keys(1)), pool.reserve(keys(2)) as new:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match="which is not stored, or is pinned"):
                pool.reserve(keys(3))
        new.commit()
    assert len(found(pool, 1, 2)) == 2


@pytest.mark.parametrize("call", ["touch", "insert", "evict"])
def test_an_error_of_a_policy_stores_nothing(call: str) -> None:
    """It reaches the caller; the pool goes on."""

    def fail(*_: object) -> Any:
        raise ZeroDivisionError

    policy = Newest()
    pool = BlockPool(3, policy)
    store(pool, 1)
    original = getattr(policy, call)
    setattr(policy, call, fail)
    with pytest.raises(ZeroDivisionError):
        pool.touch(keys(1)) if call == "touch" else pool.reserve(keys(2, 3, 4))
    setattr(policy, call, original)
    assert pool.statistics().used == 1
    assert len(store(pool, 2, 3)) == 2


def test_is_free_may_be_kept() -> None:
    """Nothing is free for whoever asks later, also when the pool is gone."""
    kept: list[Callable[[bytes], bool]] = []

    class Keeper(Newest):
        def evict(self, incoming: bytes, is_free: Callable[[bytes], bool]) -> bytes | None:
            kept.append(is_free)
            assert is_free(self.keys[0])
            return super().evict(incoming, is_free)

    pool = BlockPool(1, Keeper())
    store(pool, 1)
    store(pool, 2)
    assert not kept[0](*keys(2))
    del pool
    gc.collect()
    assert not kept[0](*keys(2))


def test_a_forecast_forgets_what_the_pool_forgets() -> None:
    pool = BlockPool(8, "lru")
    pool.forecast(2)
    pool.touch(keys(1))
    pool.clear()
    pool.touch(keys(1))
    assert (pool.forecast(2).accesses, pool.forecast(2).hits) == (2, 0)


def test_a_policy_may_not_call_its_pool() -> None:
    class Caller(Newest):
        pool: BlockPool

        def touch(self, key: bytes) -> None:
            self.pool.forget([key])

    policy = Caller()
    pool = policy.pool = BlockPool(2, policy)
    store(pool, 1)
    with pytest.raises(ConcurrentUse):
        pool.pin(keys(1))
    assert pool.statistics().used == 1


def test_a_pin_may_be_dropped_within_a_policy() -> None:
    """By a finalizer, say: it is released then."""

    class Dropper(Newest):
        def touch(self, key: bytes) -> None:
            pins.clear()

    pool = BlockPool(2, Dropper())
    pins: list[object] = []
    store(pool, 1)
    pins.append(pool.pin(keys(1)))
    found(pool, 1)
    assert pool.statistics().pinned == 0


def test_what_is_no_policy() -> None:
    with pytest.raises(InvalidType, match=r"a name or a .*Policy, not object"):
        BlockPool(8, object())  # type: ignore[arg-type]
    with pytest.raises(Unsupported):
        BlockPool(8, Newest()).forecast(1)


def test_a_pool_and_its_policy_in_a_circle_are_freed() -> None:
    class Holder(Newest):
        pool: BlockPool

    policy = Holder()
    policy.pool = BlockPool(8, policy)
    gone = weakref.ref(policy)
    del policy
    gc.collect()
    assert gone() is None
