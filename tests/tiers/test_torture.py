"""Disk tiers, one or two disks, under all that may happen to them, against a dictionary: processes
that are killed, bytes that change, forks, short deadlines, epochs, purges from outside, and a disk
that hangs now and then. ``MEMLANE_SOAK_TIER_TORTURE`` is the number of seconds.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memlane import SystemFault, TierInUse, WrongProcess
from memlane._native import ask_owner
from memlane.tiers import DiskArray, DiskTier, Ticket
from memlane.tiers.conformance import content, key
from memlane.tiers.tier import Namespace
from tests.base.test_failing_calls import calls
from tests.support import PATIENCE, Fault, Link, is_sanitized, start, until
from tests.support.built import preloaded
from tests.support.disk_tiers import capacity_of

SECONDS = float(os.environ.get("MEMLANE_SOAK_TIER_TORTURE", "0.5"))
ROW, ROWS, SLOTS, KEYS, EPOCHS = 8192, 24, 40, 90, 3
NAMESPACE, STALL = "tortured", -1  # in place of an errno: native/tests/failing_calls.cpp
LATE = 0xA5  # what a row has whose load has failed
pytestmark = [
    pytest.mark.usefixtures("hooks"),
    pytest.mark.skipif(is_sanitized(), reason="a sanitizer goes before libc, too"),
    pytest.mark.soak(seconds=60 + 2 * SECONDS),
]
Key = tuple[int, int]  # epoch, number


class Life:
    """A tier in a process, and what is known of it.

    Attributes:
        may_be_there: keys that were stored and not forgotten since, as far as this life knows.
        free: rows that are in no call; `failed` are those of them that nobody may write to.
    """

    def __init__(self, folder: Path, dice: random.Random) -> None:
        self._dice = dice
        self.counts: Counter[str] = Counter()
        self.rows = np.zeros((ROWS, ROW), np.uint8)
        self._contents = [content(number, ROW) for number in range(KEYS)]
        self.epoch = 0
        self.may_be_there = {(e, number) for e in range(EPOCHS) for number in range(KEYS)}
        self.free, self.failed = [*range(ROWS)], set[int]()
        self.busy: dict[Ticket, tuple[bool, list[Key], list[int], set[Key]]] = {}
        self.folders = [folder / name for name in "ab"[: dice.choice([1, 2])]]
        options = {
            "namespace": NAMESPACE,
            "policy": dice.choice(["lru", "tuned", "s3fifo"]),
            "timeout": PATIENCE,
            "direct": dice.choice([False, None]),
        }
        size = capacity_of(SLOTS, ROW)
        self.tier: DiskTier | DiskArray
        if len(self.folders) == 1:
            self.tier = DiskTier(self.folders[0], self.rows, size, **options)
        else:
            self.tier = DiskArray(self.folders, self.rows, size, **options)
        self.tier.set_epoch(0)

    def _content(self, which: Key) -> Any:
        epoch, number = which
        return self._contents[number] ^ np.uint8(epoch)

    def _pick(self) -> list[Key]:
        numbers = self._dice.sample(range(KEYS), min(len(self.free), self._dice.randint(1, 6)))
        return [(self.epoch, number) for number in numbers]

    def _timeout(self) -> float | None:
        return self._dice.choice([None, None, None, 0.02, 1e-3, 1e-5])

    def _take(self, count: int) -> list[int]:
        """Rows for a call; what failed before has left them alone."""
        rows = [self.free.pop() for _ in range(count)]
        for row in self.failed.intersection(rows):
            assert (self.rows[row] == LATE).all(), "a row was written to after its report"
            self.failed.remove(row)
        return rows

    def store(self) -> None:
        which = self._pick()
        rows = self._take(len(which))
        for row, each in zip(rows, which, strict=True):
            self.rows[row] = self._content(each)
        self.may_be_there.update(which)
        keys = [key(number) for _, number in which]
        self.busy[self.tier.store(keys, rows, self._timeout())] = (False, which, rows, set())
        self.counts["stores"] += len(which)

    def load(self) -> None:
        which = self._pick()
        rows = self._take(len(which))
        gone = {*which} - self.may_be_there
        ticket = self.tier.load([key(number) for _, number in which], rows, self._timeout())
        self.busy[ticket] = (True, which, rows, gone)

    def poll(self) -> None:
        for done in self.tier.poll():
            is_load, which, rows, gone = self.busy.pop(done.ticket)  # once
            for is_ok, each, row in zip(done.ok.tolist(), which, rows, strict=True):
                if is_load and is_ok:
                    assert each not in gone, f"{each} was forgotten"
                    assert (self.rows[row] == self._content(each)).all(), f"{each} is another block"
                    self.counts["loads"] += 1
                elif is_load:
                    self.rows[row] = LATE
                    self.failed.add(row)
                else:
                    self.rows[row] = 1  # an engine hands it on at once
            self.free += rows

    def settle(self) -> None:
        """Nothing is under way, and everything was reported."""
        assert self.tier.drain(PATIENCE)
        self.poll()
        assert not self.busy, "a report was lost"

    def forget(self) -> None:
        which = self._pick()
        with suppress(SystemFault):  # the disk hangs; they are not found all the same
            self.tier.forget([key(number) for _, number in which])
        self.may_be_there.difference_update(which)

    def clear(self) -> None:
        with suppress(SystemFault):
            self.tier.clear()
        self.may_be_there.clear()

    def change_epoch(self) -> None:
        self.epoch = self._dice.randrange(EPOCHS)
        self.tier.set_epoch(self.epoch)

    def hold(self) -> None:
        which = self._pick()
        with self.tier.hold([key(number) for _, number in which]) as held:
            found = {each for each, there in zip(which, held.there, strict=True) if there}
            assert found <= self.may_be_there
            self.store()

    def purge(self) -> None:
        """Another process has this namespace removed, or another one, while this one stores."""
        is_own = self._dice.random() < 0.5
        of = Namespace(NAMESPACE if is_own else "other").id
        asked = [partial(ask_owner, str(each), "0", of, PATIENCE) for each in self.folders]
        answers: list[int | None] = []
        thread = threading.Thread(target=lambda: answers.extend([ask() for ask in asked]))
        if is_own:
            self.may_be_there.clear()  # but for what is stored from now on
        thread.start()
        while thread.is_alive():
            if self.free:
                self.store()
            self.tier.drain(0.001)
            self.poll()
        thread.join()
        assert answers == [0] * len(self.folders)
        self.counts["purges"] += 1

    def fork(self) -> None:
        child = os.fork()
        if child == 0:
            try:
                self.tier.has([key(1)])
            except WrongProcess:
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0
        self.counts["forks"] += 1

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """A read or a write of the disk does not return meanwhile."""
        call = self._dice.choice(["pread", "pwrite"])
        with calls().failing(Fault("stall", 1, call, STALL))("stall"):
            until(self._reaches, "the disk hangs")
            yield
        self.counts["stalls"] += 1

    def _reaches(self) -> bool:
        if self.free:
            self._dice.choice([self.store, self.load])()
        self.tier.drain(0.001)
        self.poll()
        return calls().is_reached()

    def step(self) -> None:
        kinds: list[tuple[Callable[[], None], float]] = [
            *((self.store, 30), (self.load, 30), (self.poll, 30), (self.forget, 4)),
            *((self.change_epoch, 1), (self.hold, 3), (self.clear, 0.1), (self.purge, 0.2)),
            *((self.fork, 0.2), (self.settle, 1)),
        ]
        which, weights = zip(*kinds, strict=True)
        self._dice.choices(which, weights)[0]()
        if not self.free:
            self.tier.drain(0.01)
            self.poll()


def living(link: Link, folder: Path, seed: int, turns: int) -> Counter[str]:
    """Role: a life of so many turns."""
    dice = random.Random(seed)
    life = Life(folder, dice)
    link.tell("lives")
    freezes = {dice.randrange(turns)} | {*range(500, turns, 1500)}
    for turn in range(turns):
        if turn in freezes:
            with life.frozen():
                for call in (life.store, life.load, life.poll, life.hold) if life.free else ():
                    call()
        life.step()
    life.settle()
    life.tier.close()
    return life.counts


def is_free(folder: Path) -> bool:
    """Returns whether nobody has the files: io_uring of a killed process ends in its own time."""
    try:
        for place in folder.iterdir():
            DiskTier(place, np.zeros((2, ROW), np.uint8), capacity_of(SLOTS, ROW)).close()
    except TierInUse:
        return False
    return True


def change_bytes(folder: Path, dice: random.Random) -> int:
    changed = 0
    for file in [*folder.glob("*/0.data"), *folder.glob("*/0.headers")]:
        with file.open("r+b") as data:
            for _ in range(dice.randint(0, 3)):
                at = dice.randrange(4096, max(4097, file.stat().st_size))
                data.seek(at)
                byte = data.read(1)
                data.seek(at)
                data.write(bytes([byte[0] ^ (1 << dice.randrange(8))]) if byte else b"")
                changed += 1
    return changed


def test_torture_loads_no_wrong_block(tmp_path: Path) -> None:
    """No wrong block, no row that is written to late, no lost report."""
    seed = int(os.environ.get("MEMLANE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"MEMLANE_SOAK_SEED={seed}")
    dice, counts, end = random.Random(seed), Counter[str](), time.monotonic() + SECONDS
    while not counts["lives"] or counts["kills"] == counts["lives"] or time.monotonic() < end:
        is_killed = counts["lives"] % 2 == 0
        turns = 300 if SECONDS < 10 else dice.choice([300, 3000, 10000])
        life = start(
            living, tmp_path, dice.randrange(1 << 32), turns, method="spawn", command=preloaded()
        )
        assert life.hear() == "lives"
        if is_killed:
            time.sleep(dice.random() * min(2.0, SECONDS / 4))  # it dies at any moment
            life.kill()
        else:
            counts += life.result(PATIENCE + SECONDS)
        counts["lives"] += 1
        counts["kills"] += is_killed
        until(partial(is_free, tmp_path), "the locks have gone")
        counts["changed bytes"] += change_bytes(tmp_path, dice)
    print(dict(counts))
