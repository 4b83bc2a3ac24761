"""The plan of the measurements on a GPU, in virtual time; and its table and bars, from figures."""

import json

import pytest
from benchmarks.gpu import shown
from benchmarks.gpu.device import TO_DEVICE, TO_HOST
from benchmarks.gpu.measure import CEILING, Cell
from benchmarks.gpu.plan import DIRECTIONS, DRY, FULL, KIB, Plan, Scale, Step, steps
from benchmarks.gpu.ways import LIBRARY

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("scale", [FULL, DRY], ids=["full", "dry"])
def test_everything_is_in_the_plan_once(scale: Scale) -> None:
    """Each size both ways, never more bytes than the memory has, and a kind of each other step."""
    every = steps(scale)
    moves = [step for step in every if step.kind == "move"]
    assert len(set(every)) == len(every)
    assert {(step.size, step.direction) for step in moves} == {
        (size, direction) for size in scale.sizes for direction in DIRECTIONS
    }
    assert all(step.count * step.size <= scale.moved for step in moves)
    kinds = {"move", "rows", "pieces", "registration", "beside a matmul"}
    assert {step.kind for step in every} == kinds


def test_what_the_bars_need_comes_first() -> None:
    """A run that is cut short has the most blocks of each size; calls for most of them, which could
    fail, come last."""
    pieces, *first = steps(FULL)[: 1 + 2 * len(FULL.sizes)]
    assert pieces.kind == "pieces"
    assert [step.count for step in first] == sorted(step.count for step in first)
    assert {(step.size, step.direction) for step in first} == {
        (size, direction) for size in FULL.sizes for direction in DIRECTIONS
    }
    assert max(step.count for step in first) == 100_000


@pytest.mark.parametrize("slowness", [0.5, 1, 3])
def test_a_run_ends_in_time(slowness: float) -> None:
    """On a machine that is slower than the estimates it drops the rest, and says what."""
    plan, now, done = Plan(steps(FULL), until=100.0), 0.0, []
    while step := plan.next(now):
        now += step.seconds * slowness
        plan.took(step, step.seconds * slowness)
        done.append(step)
    assert now <= 100 + done[0].seconds * slowness  # it learns from the first
    assert done
    assert plan.dropped
    assert {*done, *plan.dropped} == set(steps(FULL))


def run_of(*cells: Cell, tests: dict[str, int] | None = None) -> shown.Run:
    return shown.Run("here", "a GPU", "today", "make gpu", DRY, [LIBRARY, "loop"], tests, [*cells])


def cell_of(direction: int, size: int, reached: float, count: int = 16) -> Cell:
    cell = Cell(Step("move", direction, size, count), method="batch")
    for peer, rate in ((CEILING, 50.0), (LIBRARY, 50 * reached), ("loop", 49.0)):
        cell.add(peer, "gb_s", rate)
    return cell


def met(run: shown.Run) -> list[bool | None]:
    return [bar.met for bar in shown.bars(run)]


def test_the_bars_are_not_met_by_what_is_absent() -> None:
    """Shares of the ceiling in the same rounds, with the most blocks; not met by what is absent."""
    passed = {"tests": 3, "failures": 0, "errors": 0, "skipped": 1}
    good = [cell_of(way, 32 * KIB, 0.96) for way in (TO_DEVICE, TO_HOST)]
    small = cell_of(TO_DEVICE, 4 * KIB, 0.79)
    pieces = Cell(Step("pieces"))
    pieces.add("one call", "gb_s", 5.0)
    pieces.add("16 pieces", "gb_s", 4.9)
    few = cell_of(TO_HOST, 32 * KIB, 0.1, count=4)
    assert met(run_of(few, *good, small, pieces, tests=passed)) == [True, True, False, True, True]
    assert met(run_of(good[0], tests={**passed, "skipped": 3})) == [True, None, None, None, None]
    assert met(run_of(tests={**passed, "failures": 1})) == [None, None, None, None, False]


def test_the_table_says_what_is_missing_and_what_failed() -> None:
    cell = cell_of(TO_DEVICE, 4 * KIB, 0.5)
    cell.skipped["vLLM"] = "vLLM is not installed"
    cell.failed["loop"] = "error 700"
    run = run_of(cell)
    run.dropped = [Step("registration")]
    text = shown.to_markdown(run, list(shown.bars(run)))
    assert "| host to GPU | 4 KiB | 16 | 50.00 | 25.00 (50%, batch) | 49.00 (98%) |" in text
    assert "vLLM: not here (vLLM is not installed)." in text
    assert "**Failed**: loop in move: 16 of 4 KiB, host to GPU: error 700." in text
    assert "Not measured, for lack of time: registration." in text
    assert json.loads(shown.to_json(run, []))["cells"][0]["peers"]["loop"]["gb_s"]["median"] == 49
