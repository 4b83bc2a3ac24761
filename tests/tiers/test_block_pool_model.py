"""BlockPool beside a dictionary: whatever is done in whatever order, no block has two owners, what
is pinned or reserved stays, and a key is found in its block or not at all."""

import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from memlane.tiers import BlockPool, Pin, Reservation
from memlane.tiers.pool import PolicyName

pytestmark = pytest.mark.property

BLOCKS = 6
KEYS = st.lists(st.integers(0, 14).map(lambda number: f"{number}".encode()), max_size=6)


class Pool(RuleBasedStateMachine):
    policy: PolicyName

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, self.policy)
        self.stored: dict[bytes, int] = {}
        self.pins: list[Pin] = []
        self.news: list[tuple[Reservation, dict[bytes, int]]] = []  # with what is not forgotten

    def held(self) -> list[int]:
        """Blocks that may not be given to anybody."""
        pinned = {block for pin in self.pins for block in pin.ids.tolist()}
        reserved = [block for new, _ in self.news for _, block in new]
        assert len(set(reserved)) == len(reserved)
        assert not pinned & set(reserved)
        return [*pinned, *reserved]

    @rule(keys=KEYS)
    def pin(self, keys: list[bytes]) -> None:
        pin = self.pool.pin(keys)
        run = len(pin.ids)
        assert pin.ids.tolist() == [self.stored[key] for key in keys[:run]]
        assert run == len(keys) or keys[run] not in self.stored
        assert pin.missing == [key for key in dict.fromkeys(keys) if key not in self.stored]
        self.pins.append(pin)

    @rule(keys=KEYS)
    def reserve(self, keys: list[bytes]) -> None:
        held = self.held()
        reserved = {key for _, those in self.news for key in those}
        new = self.pool.reserve(keys)
        for key in new.evicted:
            assert self.stored.pop(key) not in held
        those = dict(iter(new))
        assert not {*those.values()} & {*held, *self.stored.values()}
        assert not those.keys() & {*self.stored, *reserved}
        assert sorted([*those, *new.skipped]) == sorted(keys) == sorted(new.keys)
        assert new.ids[new.ids >= 0].tolist() == [*those.values()]
        self.news.append((new, those))

    @rule(data=st.data())
    def commit(self, data: Any) -> None:
        if not self.news:
            return
        new, those = self.news.pop(data.draw(st.integers(0, len(self.news) - 1)))
        mask = data.draw(st.lists(st.booleans(), min_size=len(new.ids), max_size=len(new.ids)))
        new.commit(mask)
        for key, block, ok in zip(new.keys, new.ids, mask, strict=True):
            if ok and block >= 0 and key in those:
                self.stored[key] = those[key]

    @rule(data=st.data())
    def release(self, data: Any) -> None:
        if self.pins:
            self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))).release()

    @rule(keys=KEYS)
    def touch(self, keys: list[bytes]) -> None:
        self.pool.touch(keys)

    @rule(keys=KEYS)
    def forget(self, keys: list[bytes]) -> None:
        self.pool.forget(keys)
        for key in keys:
            self.stored.pop(key, None)
            for _, those in self.news:
                those.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.pool.clear()
        self.stored.clear()
        for _, those in self.news:
            those.clear()

    @invariant()
    def counts(self) -> None:
        now = self.pool.statistics()
        assert now.used == len({*self.held(), *self.stored.values()})
        assert now.pinned == len({block for pin in self.pins for block in pin.ids.tolist()})
        assert now.reserved == sum(len(new) for new, _ in self.news)


@pytest.mark.parametrize("policy", ["lru", "arc", "s3fifo", "tuned"])
def test_a_pool_is_a_dictionary(policy: PolicyName) -> None:
    machine = type("Pool", (Pool,), {"policy": policy})
    examples = int(os.environ.get("MEMLANE_EXAMPLES", "5000")) // 200
    run_state_machine_as_test(
        machine, settings=settings(max_examples=examples, stateful_step_count=60, deadline=None)
    )
