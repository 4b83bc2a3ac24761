"""Routers learn exactly the keys that a tier holds, whatever becomes of its blocks."""

from __future__ import annotations

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from memlane import Closed
from memlane._native import ask_owner
from memlane.tiers import DiskArray, DiskTier, key_log
from memlane.tiers.conformance import wait_for
from memlane.tiers.inventory import ArrayInventory, DiskInventory, Inventory
from tests.support import PATIENCE, until

MAGIC = b"memlane keys 1\n"
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
    pick, epoch = random.Random(policy), ""
    with DiskTier(tmp_path, rows, 24 * ROW, policy=policy, timeout=PATIENCE) as disk:
        inventory = DiskInventory(disk, str(tmp_path / "0.keys"))
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
                    disk.set_epoch(epoch := pick.random().hex())
                    disk.clear()
            if pick.random() < 0.4:
                follow(inventory, view)
                there = disk.has(KEYS)
                assert view == {key for key, is_there in zip(KEYS, there, strict=True) if is_there}
                assert len(inventory._keys) == len(view)
        inventory.close(PATIENCE)
        there = disk.has(KEYS)
    assert (tmp_path / "0.keys").stat().st_size < 2 * 30 * len(KEYS)  # it does not grow
    with DiskTier(tmp_path, rows, 24 * ROW, policy=policy, timeout=PATIENCE) as disk:
        view.clear()
        disk.set_epoch(epoch)
        inventory = DiskInventory(disk, str(tmp_path / "0.keys"))
        follow(inventory, view)
        assert view == {key for key, is_there in zip(KEYS, there, strict=True) if is_there}
        inventory.close(PATIENCE)


def test_a_block_that_is_stored_right_after_a_clear_from_outside(tmp_path: Path) -> None:
    """The tier notices the clear in the call that stores the block."""
    rows = np.zeros((8, ROW), np.uint8)
    with DiskTier(tmp_path, rows, 24 * ROW, policy="lru", timeout=PATIENCE) as disk:
        inventory, view = DiskInventory(disk, str(tmp_path / "0.keys")), set[bytes]()
        for key in KEYS[:2]:
            inventory.submitted([key])
            if key == KEYS[1]:
                assert ask_owner(str(tmp_path), "0", None, PATIENCE) == 0
            inventory.reported([key], wait_for(disk, disk.store([key], [0])).ok.tolist(), False)
            follow(inventory, view)
        assert view == {KEYS[1]}
        inventory.close(PATIENCE)


def test_a_block_that_goes_and_is_stored_again_in_one_call(tmp_path: Path) -> None:
    """A tier with a `ttl` drops a block that is too old in the call that stores it again."""
    rows = np.zeros((1, ROW), np.uint8)
    with DiskTier(tmp_path, rows, 24 * ROW, timeout=PATIENCE) as disk:
        inventory, view = DiskInventory(disk, str(tmp_path / "0.keys")), set[bytes]()
        for _ in range(2):
            inventory.submitted(KEYS[:1])
            disk.forget(KEYS[:1])
            ok = wait_for(disk, disk.store(KEYS[:1], [0])).ok.tolist()
            inventory.reported(KEYS[:1], ok, False)
            follow(inventory, view)
        assert view == {KEYS[0]}
        inventory.close(PATIENCE)


def test_a_block_that_is_stored_again_before_its_first_store_is_reported(tmp_path: Path) -> None:
    rows = np.zeros((1, ROW), np.uint8)
    with DiskTier(tmp_path, rows, 24 * ROW, timeout=PATIENCE) as disk:
        inventory, view = DiskInventory(disk, str(tmp_path / "0.keys")), set[bytes]()
        inventory.submitted(KEYS[:1])
        first = wait_for(disk, disk.store(KEYS[:1], [0]))
        disk.forget(KEYS[:1])
        inventory.submitted(KEYS[:1])
        inventory.reported(KEYS[:1], first.ok.tolist(), False)
        second = wait_for(disk, disk.store(KEYS[:1], [0]))
        inventory.reported(KEYS[:1], second.ok.tolist(), False)
        follow(inventory, view)
        assert view == {KEYS[0]}
        assert not inventory._submitted
        inventory.close(PATIENCE)


def test_a_router_knows_what_several_disks_hold(tmp_path: Path) -> None:
    """Also after a restart, and when one of them is emptied from outside."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    view: set[bytes] = set()

    def opened() -> tuple[DiskArray, ArrayInventory]:
        folders = [tmp_path / "a", tmp_path / "b"]
        array = DiskArray(folders, rows, 32 * ROW, policy="lru", timeout=PATIENCE)
        each = {disk: DiskInventory(disk, f"{path}/0.keys") for path, disk in array.disks.items()}
        return array, ArrayInventory(array, each)

    def check(array: DiskArray, inventory: ArrayInventory) -> None:
        follow(inventory, view)
        there = zip(KEYS, array.peek(KEYS), strict=True)
        assert view == {key for key, is_there in there if is_there}

    array, inventory = opened()
    for at in range(0, len(KEYS), 4):
        keys = KEYS[at : at + 4]
        inventory.submitted(keys)
        done = wait_for(array, array.store(keys, range(4)))
        inventory.reported(keys, done.ok.tolist(), False)
    check(array, inventory)
    assert len(view) == len(KEYS)
    assert ask_owner(str(tmp_path / "b"), "0", None, PATIENCE) == 0
    array.touch(KEYS)
    check(array, inventory)
    assert 0 < len(view) < len(KEYS)
    array.close()
    inventory.close(PATIENCE)
    view.clear()
    array, inventory = opened()
    check(array, inventory)
    assert view
    inventory.cleared()
    array.clear()
    check(array, inventory)
    assert not view
    array.close()
    inventory.close(PATIENCE)


def test_disks_of_which_one_ends_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log delays no other's, and an error of its tier costs no event of another's."""
    rows = np.zeros((len(KEYS), ROW), np.uint8)
    array = DiskArray([tmp_path / "a", tmp_path / "b"], rows, 32 * ROW, policy="lru")
    each = {disk: DiskInventory(disk, f"{path}/0.keys") for path, disk in array.disks.items()}
    inventory, (a, b) = ArrayInventory(array, each), each
    inventory.submitted(KEYS)
    ok = wait_for(array, array.store(KEYS, range(len(KEYS)))).ok.tolist()
    inventory.reported(KEYS, ok, False)
    assert b.drain(PATIENCE)
    b.close()
    with pytest.raises(Closed):
        inventory.take()
    assert each[a].take()
    is_over = threading.Event()
    opened = key_log._opened

    def hangs(path: str, flags: int = 0) -> int:
        if path.startswith(f"{tmp_path}/a"):
            is_over.wait(PATIENCE)
        return opened(path, flags)

    monkeypatch.setattr(key_log, "_opened", hangs)
    each[a]._log.append(KEYS)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(inventory.close, PATIENCE)
        until(lambda: not each[b]._log._thread.is_alive(), "the other has ended")
        assert each[a]._log._thread.is_alive()
        is_over.set()
        closing.result()
    assert not each[a]._log._thread.is_alive()
    a.close()


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


@pytest.mark.parametrize(
    "damage",
    [b"", b"something else\n", b"memlane keys 1\n\x02no\x00\x01a", b"memlane keys 1\n\xffno"],
)
def test_a_log_that_is_damaged(tmp_path: Path, damage: bytes) -> None:
    """Is a hint: what cannot be read is left out, and what is not there is not reported."""
    path, rows = tmp_path / "0.keys", np.zeros((1, ROW), np.uint8)
    path.write_bytes(damage)
    with DiskTier(tmp_path, rows, 24 * ROW, timeout=PATIENCE) as disk:
        assert wait_for(disk, disk.store([b"no"], [0])).ok.all()
        told = [([b"no"], True)] if b"\x02no" in damage else []
        inventory = DiskInventory(disk, str(path))
        assert inventory.take() == told
        inventory.close(PATIENCE)
    assert path.read_bytes() == MAGIC + b"\x02no" * len(told)


def test_a_log_is_as_private_as_the_blocks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody else can read it; what is no file of this user is left alone."""
    path, rows = tmp_path / "0.keys", np.zeros((1, ROW), np.uint8)
    path.write_bytes(MAGIC)
    path.chmod(0o666)
    with DiskTier(tmp_path, rows, 24 * ROW, timeout=PATIENCE) as disk:
        DiskInventory(disk, str(path)).close(PATIENCE)
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()
        os.mkfifo(path)
        DiskInventory(disk, str(path)).close(PATIENCE)
        assert path.is_fifo()
    assert "is no file of this user" in caplog.text


def test_a_log_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so, and nothing else changes."""
    path, rows = tmp_path / "0.keys", np.zeros((1, ROW), np.uint8)
    path.symlink_to(tmp_path / "elsewhere")
    with DiskTier(tmp_path, rows, 24 * ROW, timeout=PATIENCE) as disk:
        inventory = DiskInventory(disk, str(path))
        inventory.close(PATIENCE)
    assert "cannot note the keys in" in caplog.text
    assert not (tmp_path / "elsewhere").exists()
