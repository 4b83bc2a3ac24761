"""What routers are told of a tier is what it holds, whatever becomes of its blocks."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from memlane.tiers import DiskTier
from memlane.tiers.inventory import DiskInventory, Inventory
from tests.support import PATIENCE

ROW, KEYS = 4096, [bytes([number]) for number in range(40)]


def follow(inventory: Inventory, view: set[bytes]) -> None:
    """Brings a router's view up to date; what it is told is new to it."""
    while taken := inventory.take():
        for keys, is_stored in taken:
            assert view.isdisjoint(keys) if is_stored else view.issuperset(keys)
            view.symmetric_difference_update(keys)


@pytest.mark.parametrize("policy", ["lru", "tuned"])
def test_a_router_knows_what_a_disk_tier_holds(tmp_path: Path, policy: str) -> None:
    rows = np.zeros((8, ROW), np.uint8)
    view: set[bytes] = set()
    pick = random.Random(policy)
    with DiskTier(tmp_path, rows, 24 * ROW, policy=policy, timeout=PATIENCE) as disk:
        inventory = DiskInventory(disk)
        for _ in range(300):
            keys = pick.sample(KEYS, pick.randint(1, 8))
            match pick.choices(["store", "load", "forget", "clear", "epoch"], [9, 3, 2, 0.2, 0.2]):
                case ["store"]:
                    inventory.submitted(keys)
                    disk.store(keys, range(len(keys)))
                    assert disk.drain()
                    (done,) = disk.poll()
                    inventory.reported(keys, done.ok.tolist(), False)
                case ["load"]:
                    disk.load(keys, range(len(keys)))
                    assert disk.drain()
                    (done,) = disk.poll()
                    inventory.reported(keys, done.ok.tolist(), True)
                case ["forget"]:
                    disk.forget(keys)
                case ["clear"]:
                    disk.clear()
                case ["epoch"]:  # as a reset does it
                    inventory.cleared()
                    disk.set_epoch(pick.random().hex())
                    disk.clear()
            if pick.random() < 0.4:
                follow(inventory, view)
                there = disk.has(KEYS)
                assert view == {key for key, is_there in zip(KEYS, there, strict=True) if is_there}
                assert len(inventory._keys) == len(view)


def test_a_router_that_has_forgotten_is_told_again() -> None:
    inventory, view = Inventory(), set[bytes]()
    inventory.reported([b"a", b"b"], [True, True], False)
    follow(inventory, view)
    inventory.found(b"a", False)
    inventory.found(b"c", True)
    inventory.again()
    view.clear()
    follow(inventory, view)
    assert view == {b"b", b"c"}


def test_more_keys_than_are_remembered() -> None:
    """The view is a part of what is there, and reports that nobody takes do not add up."""
    inventory, view = Inventory(3), set[bytes]()
    for key in KEYS:
        inventory.found(key, True)
    assert len(inventory._changed) <= 6
    follow(inventory, view)
    assert len(view) == 3
