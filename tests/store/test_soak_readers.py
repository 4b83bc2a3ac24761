"""A storage at work while readers are killed, are stopped, leave and attach at random.

``MEMLANE_SOAK_SECONDS`` is the duration (default 2). Every attached reader gets every object, with
the right bytes, as often as it was referenced; the writer never waits for dead or closed readers;
and in the end no read is outstanding and nothing is pinned.
"""

import os
import random
import time

import numpy as np
import pytest

from memlane import ShmObjectStorageHandle, StoreFull
from tests.support import PATIENCE, Link, Peer, start, until
from tests.support.stores import BytesSerde, Place, Ring, Storage

SECONDS = float(os.environ.get("MEMLANE_SOAK_SECONDS", "2"))
READERS = 3
pytestmark = pytest.mark.soak(seconds=int(60 + 2 * SECONDS))


def content(key: int) -> bytes:
    """The object stored under a key, which follows from the key."""
    dice = np.random.default_rng(key)
    return dice.bytes(int(dice.integers(1, 4000)))


def reading(link: Link, handle: ShmObjectStorageHandle) -> int:
    """Role: gets or views what it is told, and fails if that is missing or wrong."""
    dice = random.Random(os.getpid())
    count = 0
    with Storage.create_from_handle(handle) as reader:
        link.tell("attached")
        while (told := link.hear()) is not None:
            key, place = told
            if dice.random() < 0.3:
                with reader.view(*place) as view:
                    assert bytes(view) == content(key), f"wrong bytes of {key}"
                    del view
            else:
                assert reader.get(*place) == content(key), f"wrong bytes of {key}"
            count += 1
    return count


class Crowd:
    """The attached readers, and what each was told, to check that those that left had read all."""

    def __init__(self, handle: ShmObjectStorageHandle, dice: random.Random) -> None:
        self.handle, self.dice = handle, dice
        self.told: dict[Peer, int] = {}
        for _ in range(READERS):
            self.come()

    def come(self) -> None:
        peer = start(reading, self.handle)
        assert peer.hear() == "attached"
        self.told[peer] = 0

    def tell(self, key: int, place: Place) -> None:
        for peer in self.told:
            peer.tell((key, place))
            self.told[peer] += 1

    def somebody(self) -> Peer:
        return self.dice.choice(list(self.told))

    def kill_one(self) -> None:
        peer = self.somebody()
        del self.told[peer]
        if self.dice.random() < 0.3:
            peer.stop()
        peer.kill()
        self.come()

    def leave_one(self) -> None:
        peer = self.somebody()
        told = self.told.pop(peer)
        peer.tell(None)
        assert peer.result() == told
        self.come()

    def stop_one(self) -> None:
        peer = self.somebody()
        peer.stop()
        time.sleep(0.02)  # the time is what is tested
        peer.resume()


def test_readers_come_and_go() -> None:
    """No object is lost, wrong or kept, and the writer never waits in vain."""
    dice = random.Random(1)
    with Storage(4096, READERS, Ring(1 << 15, create=True), BytesSerde, max_objects=64) as writer:
        crowd = Crowd(writer.handle(), dice)
        happens = [crowd.kill_one, crowd.leave_one, crowd.stop_one]
        key = 0
        until_when = time.monotonic() + SECONDS
        while key <= 20 or time.monotonic() < until_when:
            key += 1
            value, since = content(key), time.monotonic()
            while True:
                try:
                    place = writer.put(key, value)
                    break
                except StoreFull:
                    assert time.monotonic() - since < PATIENCE
                    time.sleep(0.0005)  # until they have read
            crowd.tell(key, place)
            if dice.random() < 0.2:
                again = dice.choice(list(writer.key_index))
                assert isinstance(again, int)
                crowd.tell(again, writer.get_cached(again))
            if dice.random() < 0.05:
                dice.choice(happens)()
        until(lambda: not any(reader.outstanding for reader in writer.statistics().readers))
        for peer, told in crowd.told.items():
            peer.tell(None)
            assert peer.result() == told
        seen = writer.statistics()
        assert seen.puts == key
        assert seen.objects == len(writer.key_index) == key - seen.evictions
        writer.free_unused()
        assert writer.statistics().evictions > seen.evictions
