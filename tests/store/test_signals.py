"""A signal handler raises in the middle of a call: the call is undone, and the storage still works.

Fails without the guard: a lock taken right before the exception is never released, and books that
are half updated lose objects, or their space, for ever.
"""

import random
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from types import FrameType
from typing import Any

import pytest

from memlane import InvalidArgument, StoreFull
from tests.support import Alarm, Link, alarm_after, start
from tests.support.stores import BytesSerde, Ring, Storage, store_of

ROUNDS = 4
STEPS = 250


def call_at_random(dice: random.Random, writer: Storage, reader: Storage, key: int) -> None:
    places = list(writer.key_index.values())
    match dice.randrange(9):
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
        case 5 if places:
            with suppress(InvalidArgument):  # all its references have been read
                writer.drop_reference(dice.choice(list(writer.key_index)))
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
    interruptions = 0
    for _ in range(ROUNDS):
        with store_of(1, size=1024, max_object_size=256, max_objects=8) as (writer, (reader,)):
            for key in range(STEPS):
                try:
                    with alarm_after(dice.uniform(1e-6, dice.choice([2e-5, 5e-5]))):
                        call_at_random(dice, writer, reader, key)
                except Alarm:
                    interruptions += 1
                except StoreFull:
                    read_all(writer, reader)
                books_agree(writer)
            read_all(writer, reader)
            for _ in range(4):  # by so much at a time that this is all
                writer.free_unused()
            assert not writer.key_index  # nobody owes a read, so the table and the books agree
            for key in range(STEPS, STEPS + 20):  # several times around
                assert reader.get(*writer.put(key, bytes(200))) == bytes(200)
    return interruptions


def test_an_interrupted_call_leaves_nothing_half_done() -> None:
    """Whatever was interrupted: nothing half-done stays, and every later call works."""
    peers = [start(interrupted, seed) for seed in range(2)]
    assert sum(peer.result() for peer in peers) > 100


class Fickle:
    """A key that is interrupted at the `n`-th look at its hash."""

    def __init__(self) -> None:
        self.looks = 0

    def __hash__(self) -> int:
        self.looks -= 1
        if self.looks == 0:
            raise Alarm
        return 7


@pytest.mark.parametrize("n", range(1, 9))
def test_an_interrupt_in_the_hash_of_a_key_changes_nothing(n: int) -> None:
    """Keys are Python's, so a put that stores or evicts them can be interrupted there."""
    with Storage(64, 1, Ring(256, create=True), BytesSerde, object()) as writer:
        keys = [Fickle() for _ in range(8)]
        for key in keys[:4]:
            writer.get(*writer.put(key, b"x" * 52))
        for key in keys:
            key.looks = n
        for key in keys[4:]:
            place = None
            while place is None:
                with suppress(Alarm):
                    place = writer.put(key, b"y" * 52)
                books_agree(writer)
            assert writer.get(*place) == b"y" * 52
        assert list(writer.key_index) == keys[-len(writer.key_index) :]
        seen = writer.statistics()
        assert (seen.puts, seen.evictions) == (8, 8 - len(writer.key_index))


@pytest.mark.parametrize("call", ["drop_reference", "get_cached"])
def test_an_interrupted_call_keeps_the_references_right(call: str) -> None:
    """The table has as many references of an object as the storage knows of."""
    for line in count(1):
        with store_of(1, size=1024, max_object_size=256) as (writer, (reader,)):
            place = writer.put("key", b"x")
            writer.get_cached("key")
            has_come = raise_at(line, lambda call=call: getattr(writer, call)("key"))
            for _ in range(writer.writer_flag[place[1]]):
                reader.get(*place)
            assert writer.statistics().readers[0].outstanding == 0
            writer.free_unused()
            assert not writer.key_index
        if not has_come:
            assert line > 3
            return


def raise_at(line: int, call: Callable[[], object]) -> bool:
    """Raises at that line of Python that `call` executes; false if it has fewer.

    A line that comes again is the end of a `with` block, where no signal handler is called.
    """
    seen: set[tuple[FrameType, int]] = set()

    def trace(frame: FrameType, event: str, _argument: object) -> Any:
        here = (frame, frame.f_lineno)
        if event == "line" and here not in seen:
            seen.add(here)
            if len(seen) == line:
                raise Alarm
        return trace

    sys.settrace(trace)
    try:
        call()
    except Alarm:
        return True
    finally:
        sys.settrace(None)
    return False
