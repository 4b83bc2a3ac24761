"""Any sequence of starts, writes and ends against a simple model: an array while it lives."""

from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memlane import LayoutMismatch, SharedOffloadRegion
from tests.support.queues import refuses
from tests.support.regions import mapped, new_id, path_of, region_of

pytestmark = pytest.mark.property

MOST = 4


class Holders(RuleBasedStateMachine):
    """Holders of one instance in this process; the model is the bytes they must all see."""

    @initialize(
        blocks=st.integers(1, 4),
        workers=st.integers(1, 3),
        cell=st.sampled_from([1, 7, 100, 4096, 5000]),
        extra=st.sampled_from([0, 1, 4096]),
        participants=st.sampled_from([None, 1, 2]),
    )
    def begin(
        self, blocks: int, workers: int, cell: int, extra: int, participants: int | None
    ) -> None:
        self.instance = new_id()
        self.shape: dict[str, Any] = {
            "blocks": blocks,
            "workers": workers,
            "cell": cell,
            "extra": extra,
        }
        self.participants = participants
        self.total = blocks * workers * cell + extra
        # Each generation: its bytes, who holds it, whether it has its name.
        self.named: Generation | None = None
        self.generations: list[Generation] = []

    @rule(rank=st.integers(0, 2), whole=st.booleans())
    def start(self, rank: int, whole: bool) -> None:
        if sum(len(one.holders) for one in self.generations) == MOST:
            return
        place = None if whole else rank % self.shape["workers"]
        region = region_of(
            self.instance, place, participants=self.participants, threads=1, **self.shape
        )
        assert region._creator == (self.named is None)
        if self.named is None:
            self.named = Generation(np.zeros(self.total, np.uint8))
            self.generations.append(self.named)
        self.named.holders.append(region)
        if self.participants is not None and len(self.named.holders) >= self.participants:
            self.named = None

    @precondition(lambda self: any(one.holders for one in self.generations))
    @rule(data=st.data(), value=st.integers(1, 255))
    def write(self, data: st.DataObject, value: int) -> None:
        generation = data.draw(st.sampled_from([one for one in self.generations if one.holders]))
        region = data.draw(st.sampled_from(generation.holders))
        block = data.draw(st.integers(0, self.shape["blocks"] - 1))
        row = region.create_kv_memoryview()[block]
        row[:] = bytes([value]) * len(row)
        generation.bytes[block * len(row) : (block + 1) * len(row)] = value

    @precondition(lambda self: any(one.holders for one in self.generations))
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        generation = data.draw(st.sampled_from([one for one in self.generations if one.holders]))
        region = data.draw(st.sampled_from(generation.holders))
        region.cleanup()
        generation.holders.remove(region)
        if not generation.holders:
            self.generations.remove(generation)
            if generation is self.named:
                self.named = None

    @precondition(lambda self: self.named is not None)
    @rule()
    def ask_for_another_geometry(self) -> None:
        with refuses(LayoutMismatch):
            region_of(self.instance, **{**self.shape, "blocks": self.shape["blocks"] + 1})

    @precondition(lambda self: self.named is None)
    @rule(size=st.integers(0, 9000))
    def leave_something_dead(self, size: int) -> None:
        path_of(self.instance).write_bytes(b"\xee" * size)

    @invariant()
    def all_see_the_same(self) -> None:
        for generation in getattr(self, "generations", []):
            for region in generation.holders:
                assert bytes(region.mmap_obj[:]) == generation.bytes.tobytes()
        if getattr(self, "named", None) is not None:
            with mapped(path_of(self.instance)) as memory:
                assert bytes(memory) == self.named.bytes.tobytes()

    def teardown(self) -> None:
        for generation in getattr(self, "generations", []):
            for region in generation.holders:
                region.cleanup()
        if hasattr(self, "instance"):
            path_of(self.instance).unlink(missing_ok=True)


class Generation:
    def __init__(self, contents: "np.ndarray[Any, np.dtype[np.uint8]]") -> None:
        self.bytes = contents
        self.holders: list[SharedOffloadRegion] = []


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=40, stateful_step_count=15)
