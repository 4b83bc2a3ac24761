"""S3: any sequence of allocations and frees, against a map of the ring's bytes.

``MEMLANE_SOAK_STEPS`` is the number of steps (default 5,000; more in `make soak`).
"""

import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memlane.store.ring import ID_MAX
from tests.support.stores import Ring

pytestmark = pytest.mark.property

HEADER = 8


class RingAgainstByteMap(RuleBasedStateMachine):
    """Every byte of the ring belongs to at most one allocation, and keeps what was written."""

    def __init__(self) -> None:
        super().__init__()
        self.ring: Ring

    @initialize(size=st.integers(9, 300), first=st.sampled_from([0, 5, ID_MAX - 3, ID_MAX - 1]))
    def make(self, size: int, first: int) -> None:
        self.size = size
        self.ring = Ring(size, create=True)
        self.ring.monotonic_id_start = self.ring.monotonic_id_end = first
        self.next_id = first
        self.owner: list[int | None] = [None] * size  # the model: whose is each byte
        self.allocations: dict[int, tuple[int, int]] = {}  # id -> (address, bytes), oldest first

    def bytes_of(self, address: int, total: int) -> range:
        first = address % self.size
        assert first + total <= self.size, "an allocation crosses the end of the ring"
        return range(first, first + total)

    @rule(nbytes=st.integers(1, 300))
    def allocate(self, nbytes: int) -> None:
        total = nbytes + HEADER
        before = (self.ring.data_buffer_start, self.ring.data_buffer_end)
        try:
            address, number = self.ring.allocate_buf(nbytes)
        except MemoryError:
            assert (self.ring.data_buffer_start, self.ring.data_buffer_end) == before
            assert self.allocations or total > self.size, "an empty ring refused what fits it"
            assert not self.has_room(total)
            return
        assert number == self.next_id
        self.next_id = (self.next_id + 1) % ID_MAX
        assert 0 <= address < 2 * self.size
        for at in self.bytes_of(address, total):
            assert self.owner[at] is None, "two allocations overlap"
            self.owner[at] = number
        self.allocations[number] = (address, total)
        with self.ring.access_buf(address) as (view, what):
            assert what == (number, total)
            assert len(view) == nbytes
            view[:] = bytes([number % 251]) * nbytes

    def has_room(self, total: int) -> bool:
        """By the documented arithmetic: after the newest allocation, or at the ring's start."""
        start, end = self.ring.data_buffer_start, self.ring.data_buffer_end
        if end % self.size + total > self.size:
            end = (end // self.size + 1) * self.size
        return end + total - start <= self.size

    @rule(kept=st.integers(0, 5), nbytes=st.none() | st.integers(-1, 400))
    def free(self, kept: int, nbytes: int | None) -> None:
        """Frees the oldest, except the newest `kept`, until enough is freed."""
        expected, total = [], 0
        most = max(0, len(self.allocations) - kept)
        for number, (_, size) in list(self.allocations.items())[:most]:
            if total >= (self.size if nbytes is None else nbytes):
                break
            expected.append(number)
            total += size
        newest = set(list(self.allocations)[-kept:]) if kept else set()
        freed = self.ring.free_buf(lambda number, _: number not in newest, nbytes)
        assert list(freed) == expected
        for number in expected:
            address, size = self.allocations.pop(number)
            for at in self.bytes_of(address, size):
                self.owner[at] = None

    @rule()
    def clear(self) -> None:
        self.ring.clear()
        self.allocations.clear()
        self.owner = [None] * self.size
        assert (self.ring.data_buffer_start, self.ring.data_buffer_end) == (0, 0)

    @precondition(lambda self: hasattr(self, "owner"))
    @invariant()
    def books_agree(self) -> None:
        ring = self.ring
        addresses = {number: address for number, (address, _) in self.allocations.items()}
        assert ring.metadata == addresses
        assert 0 <= ring.data_buffer_start < self.size
        assert ring.data_buffer_start <= ring.data_buffer_end <= ring.data_buffer_start + self.size
        assert ring.monotonic_id_end == self.next_id
        for number, (address, total) in self.allocations.items():
            with ring.access_buf(address) as (view, what):
                assert what == (number, total)
                assert bytes(view) == bytes([number % 251]) * (total - HEADER)

    def teardown(self) -> None:
        if hasattr(self, "ring"):
            self.ring.close()


STEPS = int(os.environ.get("MEMLANE_SOAK_STEPS", "5000"))
STEPS_OF_A_RING = 50
RingAgainstByteMap.TestCase.settings = settings(
    max_examples=STEPS // STEPS_OF_A_RING, stateful_step_count=STEPS_OF_A_RING
)
TestRing: Any = pytest.mark.soak(seconds=60 + STEPS // 100)(RingAgainstByteMap.TestCase)
