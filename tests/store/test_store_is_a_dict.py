"""Any sequence of calls against a simple model: a dict of objects, and who has read them.

``MEMLANE_SOAK_STEPS`` is the number of steps (default 12,000; more in `make soak`).
"""

import os
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memlane import ObjectGone, RankTaken, StoreFull, UnknownKey
from memlane.store.ring import ID_MAX
from tests.support.stores import BytesSerde, Place, Ring, Storage

pytestmark = pytest.mark.property

KEYS = st.integers(0, 5)


class Model:
    """One object as the model sees it."""

    def __init__(self, value: bytes, n_readers: int) -> None:
        self.value = value
        self.references = 1
        self.reads = [0] * n_readers
        self.is_touched = False


class StorageAgainstDict(RuleBasedStateMachine):
    """Every object in the storage is in the model; the model allows each eviction."""

    @initialize(
        n_readers=st.integers(1, 3),
        size=st.integers(128, 800),
        limit=st.integers(30, 300),
        max_objects=st.integers(2, 6),
        first=st.sampled_from([0, ID_MAX - 3]),
    )
    def make(self, n_readers: int, size: int, limit: int, max_objects: int, first: int) -> None:
        self.n_readers, self.limit, self.max_objects = n_readers, limit, max_objects
        ring = Ring(size, create=True)
        ring.monotonic_id_start = ring.monotonic_id_end = first
        self.writer = Storage(limit, n_readers, ring, BytesSerde, max_objects=max_objects)
        self.readers: list[Storage | None] = [None] * n_readers  # by place
        self.was_there = [False] * n_readers
        self.model: dict[int, Model] = {}
        self.places: dict[int, Place] = {}
        self.gone: list[Place] = []
        self.orphans: dict[Place, Model] = {}  # that were not found to be gone
        self.views: list[tuple[Model, int, Any, Any]] = []  # object, place, block, value
        self.puts = self.hits = self.evictions = 0
        self.reads = [0] * n_readers  # of who has the place now
        self.attach()

    # What may be evicted -------------------------------------------------------------------

    def owes(self, model: Model, place: int) -> bool:
        is_waited_for = self.readers[place] is not None or not self.was_there[place]
        return is_waited_for and model.reads[place] < model.references

    def may_go(self, key: int) -> bool:
        model = self.model[key]
        is_viewed = any(
            viewed is model and self.readers[place] is not None for viewed, place, *_ in self.views
        )
        is_owed = any(self.owes(model, place) for place in range(self.n_readers))
        return not (is_viewed or is_owed or model.is_touched)

    def drop_evicted(self) -> int:
        """Removes what the storage has evicted, oldest first; the model must allow it."""
        count = 0
        for key in list(self.model):
            if self.writer.is_cached(key):
                break
            assert self.may_go(key), f"{key} was evicted though somebody needs it"
            self.forget(key)
            count += 1
        self.evictions += count
        return count

    def forget(self, key: int) -> None:
        del self.model[key]
        self.gone.append(self.places.pop(key))

    # Calls ---------------------------------------------------------------------------------

    @rule(key=KEYS, size=st.integers(0, 60) | st.integers(0, 310), letter=st.integers(0, 255))
    def put(self, key: int, size: int, letter: int) -> None:
        value = bytes([letter]) * size
        try:
            place = self.writer.put(key, value)
        except StoreFull:
            self.drop_evicted()
            fits = 12 + size <= self.writer.ring_buffer.data_buffer_size
            is_obstructed = any(model in self.orphans.values() for model, *_ in self.views)
            assert not fits or is_obstructed or not self.may_go(next(iter(self.model)))
            return
        except ValueError:
            assert key in self.model or 4 + size > self.limit
            return
        assert key not in self.model
        assert 4 + size <= self.limit
        self.drop_evicted()
        self.model[key] = Model(value, self.n_readers)
        self.places[key] = place
        self.puts += 1
        assert len(self.model) <= self.max_objects

    @rule(key=KEYS, place=st.integers(0, 2))
    def get(self, key: int, place: int) -> None:
        reader = self.readers[place % self.n_readers]
        if reader is None or key not in self.model:
            return
        model = self.model[key]
        assert reader.get(*self.places[key]) == model.value
        assert self.writer.get(*self.places[key]) == model.value
        self.count(model, place % self.n_readers)

    def count(self, model: Model, place: int) -> None:
        self.reads[place] += 1
        model.reads[place] = min(model.reads[place] + 1, model.references)

    @rule(stays=KEYS)
    def read_all_but(self, stays: int) -> None:
        """So that something can be evicted."""
        for place, reader in enumerate(self.readers):
            for key, model in self.model.items():
                while reader is not None and key != stays and model.reads[place] < model.references:
                    assert reader.get(*self.places[key]) == model.value
                    self.count(model, place)

    @rule(key=KEYS, place=st.integers(0, 2))
    def open_view(self, key: int, place: int) -> None:
        place %= self.n_readers
        reader = self.readers[place]
        if reader is None or key not in self.model:
            return
        block = reader.view(*self.places[key])
        self.views.append((self.model[key], place, block, block.__enter__()))
        assert bytes(self.views[-1][3]) == self.model[key].value

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def close_view(self, data: st.DataObject) -> None:
        model, place, block, value = self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))
        if self.readers[place] is not None:
            assert bytes(value) == model.value
            self.count(model, place)
        del value
        block.__exit__(None, None, None)

    @rule(key=KEYS)
    def get_cached(self, key: int) -> None:
        try:
            assert self.writer.get_cached(key) == self.places[key]
        except UnknownKey:
            assert key not in self.model
            return
        self.hits += 1
        self.model[key].references += 1
        self.model[key].is_touched = False

    @rule(key=KEYS)
    def touch(self, key: int) -> None:
        try:
            self.writer.touch(key)
        except UnknownKey:
            assert key not in self.model
            return
        self.model[key].is_touched = True

    @rule()
    def release_touches(self) -> None:
        self.writer.release_touches()
        for model in self.model.values():
            model.is_touched = False

    @rule()
    def free_unused(self) -> None:
        goes_first = bool(self.model) and self.may_go(next(iter(self.model)))
        self.writer.free_unused()
        assert (self.drop_evicted() > 0) == goes_first

    @rule(happens=st.integers(0, 7))
    def clear(self, happens: int) -> None:
        if happens > (3 if self.views else 0):
            return  # seldom, or there is never much in it; but often beside views
        self.writer.clear()
        for key, model in list(self.model.items()):
            self.orphans[self.places[key]] = model
            model.references = 0
            del self.model[key], self.places[key]

    @rule()
    def attach(self) -> None:
        try:
            reader = Storage.create_from_handle(self.writer.handle())
        except RankTaken:
            assert None not in self.readers
            return
        place = reader.statistics().rank
        assert place is not None
        assert self.readers[place] is None
        if self.was_there[place]:
            assert all(self.was_there), "somebody's place was taken before a free one"
            for model in self.model.values():
                model.reads[place] = model.references
        self.readers[place] = reader
        self.reads[place] = 0
        self.was_there[place] = True

    @rule(place=st.integers(0, 12))
    def leave(self, place: int) -> None:
        if place >= self.n_readers:
            return
        reader = self.readers[place]
        if reader is not None and all(view[1] != place for view in self.views):
            reader.close()
            self.readers[place] = None

    @rule()
    def statistics_agree(self) -> None:
        seen = self.writer.statistics()
        assert (seen.puts, seen.hits, seen.evictions) == (self.puts, self.hits, self.evictions)
        sizes = [4 + len(model.value) for model in self.model.values()]
        assert (seen.objects, seen.bytes) == (len(sizes), sum(sizes))
        for place, reader in enumerate(seen.readers):
            is_there = self.readers[place] is not None
            state = "running" if is_there else "closed" if self.was_there[place] else "absent"
            owed = sum(m.references - m.reads[place] for m in self.model.values())
            assert reader.state == state
            assert reader.outstanding == (0 if state == "closed" else owed)
            assert reader.reads == self.reads[place]
            if is_there:
                assert reader.views == sum(view[1] == place for view in self.views)

    # What holds at any time ----------------------------------------------------------------

    @precondition(lambda self: hasattr(self, "views"))
    @invariant()
    def books_agree(self) -> None:
        writer = self.writer
        assert list(writer.key_index.items()) == [(key, self.places[key]) for key in self.model]
        assert writer.id_index == {number: key for key, (_, number) in self.places.items()}
        assert writer.writer_flag == {
            self.places[key][1]: model.references for key, model in self.model.items()
        }
        for model, place, _, value in self.views:
            assert self.readers[place] is not None
            assert bytes(value) == model.value
        for key, model in self.model.items():
            with writer.ring_buffer.access_buf(self.places[key][0]) as (data, (number, _)):
                assert number == self.places[key][1]
                assert bytes(data[4 : 4 + len(model.value)]) == model.value
        for at, model in list(self.orphans.items()):
            try:
                assert writer.get(*at) == model.value
            except ObjectGone:
                assert all(viewed is not model for viewed, *_ in self.views)
                del self.orphans[at]
                self.gone.append(at)
        for at in self.gone[-3:]:
            try:
                writer.get(*at)
            except ObjectGone:
                continue
            raise AssertionError("what is gone can be got")

    def teardown(self) -> None:
        if not hasattr(self, "views"):
            return
        self.statistics_agree()
        for *_, block, _value in self.views:
            block.__exit__(ValueError, None, None)
        self.views.clear()
        for reader in self.readers:
            if reader is not None:
                reader.close()
        self.writer.close()


STEPS = int(os.environ.get("MEMLANE_SOAK_STEPS", "12000"))
STEPS_OF_A_STORAGE = 80
StorageAgainstDict.TestCase.settings = settings(
    max_examples=STEPS // STEPS_OF_A_STORAGE, stateful_step_count=STEPS_OF_A_STORAGE
)
TestStorage: Any = pytest.mark.soak(seconds=60 + STEPS // 100)(StorageAgainstDict.TestCase)
