"""A signal handler that raises in the middle of a call: the call is taken back, the storage works.

Fails without the guard: a lock that is taken right before the exception is never given back, and
books that are half changed lose objects, or their space, for ever.
"""

import random
from typing import Any

from memlane import StoreFull
from memlane.store.index import ObjectIndex
from tests.harness import Alarm, Link, alarm_after, start
from tests.stores import BytesSerde, Ring, Storage, store_of

ROUNDS = 4
STEPS = 250


def call_at_random(dice: random.Random, writer: Storage, reader: Storage, key: int) -> None:
    places = list(writer.key_index.values())
    match dice.randrange(8):
        case 0 if places:
            reader.get(*dice.choice(places))
        case 1 if places:
            with reader.view(*dice.choice(places)) as view:
                bytes(view)
                del view
        case 2:
            writer.free_unused()
        case 3 if places:
            writer.get_cached(dice.choice(list(writer.key_index)))
        case 4 if dice.random() < 0.1:
            writer.clear()
        case _:
            writer.put(key, bytes([key % 256]) * dice.randrange(10, 200))


def books_agree(writer: Storage) -> None:
    """The three indexes, the ring and the table tell of the same objects."""
    seen = writer.statistics()
    ids = {number for _, number in writer.key_index.values()}
    assert ids == set(writer.id_index) == set(writer.writer_flag)
    assert ids == set(writer.ring_buffer.metadata)
    assert seen.objects == len(ids)
    assert seen.readers[0].views == 0


def read_all(writer: Storage, reader: Storage) -> None:
    for key, place in writer.key_index.items():
        assert isinstance(key, int)
        assert set(reader.get(*place)) == {key % 256}
    while writer.statistics().readers[0].outstanding > 0:
        for place in writer.key_index.values():
            reader.get(*place)


def interrupted(_link: Link, seed: int) -> int:
    """Role: calls that are interrupted at random moments; how many were."""
    dice = random.Random(seed)
    count = 0
    for _ in range(ROUNDS):
        with store_of(1, size=1024, max_object_size=256, max_objects=8) as (writer, (reader,)):
            for key in range(STEPS):
                try:
                    with alarm_after(dice.uniform(1e-6, dice.choice([2e-5, 5e-5]))):
                        call_at_random(dice, writer, reader, key)
                except Alarm:
                    count += 1
                except StoreFull:
                    read_all(writer, reader)
                books_agree(writer)
            read_all(writer, reader)
            for key in range(STEPS, STEPS + 20):  # several times around
                assert reader.get(*writer.put(key, bytes(200))) == bytes(200)
    return count


def test_interrupted_anywhere() -> None:
    """Whatever was interrupted: nothing half-done stays, and every later call works."""
    peers = [start(interrupted, seed) for seed in range(2)]
    assert sum(peer.result() for peer in peers) > 100


def test_a_second_interruption_of_the_mending() -> None:
    """What takes a call back may be interrupted, too: it comes again before the next call."""
    with Storage(256, 1, Ring(1024, create=True), BytesSerde) as writer:
        mend, attempts = writer._index.forget, []

        def interrupted_twice(chunk_id: int) -> None:
            attempts.append(chunk_id)
            if len(attempts) < 3:
                raise Alarm
            mend(chunk_id)

        def fail(*place: Any) -> None:
            ObjectIndex.add(writer._index, *place)
            raise ZeroDivisionError

        writer._index.forget = interrupted_twice  # type: ignore[method-assign]
        writer._index.add = fail  # type: ignore[method-assign]
        for _ in range(2):
            try:
                writer.put("k", b"value")
            except Alarm:
                continue
            raise AssertionError("nothing was raised")
        del writer._index.add
        assert writer.get(*writer.put("k", b"value")) == b"value"
        assert attempts == [0, 0, 0]
        assert writer.statistics().puts == 1
        books_agree(writer)
