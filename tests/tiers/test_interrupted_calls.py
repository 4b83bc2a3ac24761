"""A signal handler raises in the middle of a call of a tier, at any moment."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memlane.tiers import DiskArray, Tier
from memlane.tiers.conformance import content, key, wait_for
from tests.support import PATIENCE, Alarm, alarm_after
from tests.support.disk_tiers import tier_on
from tests.support.remote_tiers import ROW, rows_of, tier_in_memory

MANY = 400
LATEST = 2e-4
"""Seconds after which the handler runs at the latest: some calls are over by then."""


@pytest.fixture(params=["disk", "disks", "server"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Tier]:
    def on_disk(rows: Any) -> Tier:
        return tier_on(tmp_path, rows, capacity=2 * MANY)

    def on_disks(rows: Any) -> Tier:
        return DiskArray([tmp_path / "a", tmp_path / "b"], rows, "4MiB", direct=False)

    return {"disk": on_disk, "disks": on_disks, "server": tier_in_memory}[request.param]


def interrupted(dice: random.Random, call: Callable[[], Any]) -> Any:
    """Returns its result; None if the handler came before that."""
    returned = None
    with suppress(Alarm), alarm_after(dice.uniform(1e-6, LATEST)):
        returned = call()
    return returned


def loads(tier: Tier, *numbers: int) -> list[bool]:
    """Loads these blocks, and returns which are there; the caller compares their rows."""
    ok: list[bool] = wait_for(tier, tier.load([key(each) for each in numbers], [0, 1])).ok.tolist()
    return ok


@pytest.mark.parametrize("kind", ["store", "load"])
def test_what_was_begun_is_reported_once(opened: Callable[[Any], Tier], kind: str) -> None:
    """It is begun whole or not at all, or by whole disks, and reported under its ticket."""
    dice, rows = random.Random(kind), rows_of(2, ROW)
    right = rows.copy()
    with opened(rows) as tier:
        wait_for(tier, tier.store([key(0), key(1)], [0, 1], PATIENCE))
        returned = 0
        for number in range(0, 2 * MANY, 2):
            is_store = kind == "store"
            keys = [key(number), key(number + 1)] if is_store else [key(0), key(1)]
            rows[:] = right if is_store else 0
            ticket = interrupted(dice, lambda keys=keys: getattr(tier, kind)(keys, [0, 1]))
            assert tier.drain(PATIENCE)
            reports = tier.poll()
            returned += ticket is not None
            assert len(reports) <= 1
            assert ticket is None or [done.ticket for done in reports] == [ticket]
            ok = [False] * 2
            for done in reports:
                ok = done.ok.tolist()
                assert any(ok) if ticket is None and isinstance(tier, DiskArray) else all(ok)
            if is_store:
                rows[:] = 0
            if number or not is_store:
                there = loads(tier, number, number + 1) if is_store else ok
                assert there == ok
                assert [(row == one).all() for row, one in zip(rows, right, strict=True)] == ok
        assert returned < MANY


def test_no_report_is_lost(opened: Callable[[Any], Tier]) -> None:
    """The next poll has those of one that was interrupted."""
    dice, seen, begun = random.Random(1), [], []
    with opened(rows_of(2)) as tier:
        wait_for(tier, tier.store([key(0), key(1)], [0, 1], PATIENCE))
        for _ in range(MANY):
            begun.append(tier.load([key(0)], [1]))
            seen += interrupted(dice, tier.poll) or []
        assert tier.drain(PATIENCE)
        assert sorted(done.ticket for done in seen + tier.poll()) == begun


@pytest.mark.parametrize("kind", ["forget", "clear"])
def test_a_block_is_forgotten_or_right(opened: Callable[[Any], Tier], kind: str) -> None:
    """A call that was interrupted can be made again, and then they are gone."""
    dice, rows = random.Random(kind), rows_of(2)

    def call(tier: Tier) -> None:
        tier.clear() if kind == "clear" else tier.forget([key(0), key(1)])

    with opened(rows) as tier:
        for _ in range(MANY // 8):
            rows[:] = rows_of(2)
            assert wait_for(tier, tier.store([key(0), key(1)], [0, 1], PATIENCE)).ok.all()
            interrupted(dice, lambda: call(tier))
            for number, is_there in enumerate(loads(tier, 0, 1)):
                assert not is_there or (rows[number] == content(number, ROW)).all()
            call(tier)
            assert loads(tier, 0, 1) == [False, False]
