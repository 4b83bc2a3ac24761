"""A signal handler raises in the middle of a call of a tier, at any moment."""

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from memlane.tiers import Tier
from memlane.tiers.conformance import content, key, wait_for
from tests.support import PATIENCE, Alarm, alarm_after
from tests.support.disk_tiers import tier_on
from tests.support.remote_tiers import ROW, rows_of, tier_in_memory

MANY = 400
LATEST = 2e-4
"""Seconds after which the handler runs at the latest: some calls are over by then."""


@pytest.fixture(params=["disk", "server"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Any], Tier]:
    def on_disk(rows: Any) -> Tier:
        return tier_on(tmp_path, rows, capacity=2 * MANY)

    return on_disk if request.param == "disk" else tier_in_memory


def interrupted(dice: random.Random, call: Callable[[], Any]) -> Any:
    """What it returned; None if the handler came before that."""
    returned = None
    with suppress(Alarm), alarm_after(dice.uniform(1e-6, LATEST)):
        returned = call()
    return returned


def loads(tier: Tier, *numbers: int) -> list[bool]:
    """Which of these blocks are there; their rows are compared by the caller."""
    ok: list[bool] = wait_for(tier, tier.load([key(each) for each in numbers], [0, 1])).ok.tolist()
    return ok


@pytest.mark.parametrize("kind", ["store", "load"])
def test_a_call_is_begun_whole_or_not_at_all(opened: Callable[[Any], Tier], kind: str) -> None:
    """What was begun is reported, once, under its ticket."""
    dice, rows = random.Random(kind), rows_of(2, ROW)
    with opened(rows) as tier:
        wait_for(tier, tier.store([key(0), key(1)], [0, 1], PATIENCE))
        returned = 0
        for number in range(0, 2 * MANY, 2):
            keys = [key(number), key(number + 1)] if kind == "store" else [key(0), key(1)]
            ticket = interrupted(dice, lambda keys=keys: getattr(tier, kind)(keys, [0, 1]))
            assert tier.drain(PATIENCE)
            reports = tier.poll()
            returned += ticket is not None
            assert [done.ok.tolist() for done in reports] == [[True, True]] * len(reports)
            assert len(reports) <= 1
            assert ticket is None or [done.ticket for done in reports] == [ticket]
            if kind == "store" and number:
                rows[:] = 0
                assert loads(tier, number, number + 1) == [bool(reports)] * 2
                rows[:] = rows_of(2, ROW)
        assert returned < MANY
        assert (rows == rows_of(2, ROW)).all()


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
