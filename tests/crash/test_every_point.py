"""Kills a real process at every sync point that its role passes, and checks what the survivors see.

The processes run a build of the extension that has hooks (`make hooks`), in a /dev/shm of their own
where the machine allows that. ``MEMLANE_SOAK_PASSAGES`` is the number of a point's first passages
at which they die (default 1). `pytest -s tests/crash` prints every death and its outcome.
"""

import os
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest

from memlane import _native
from tests.support import (
    Crash,
    Hooks,
    Link,
    Passage,
    Spot,
    crash_everywhere,
    start,
    start_control,
)
from tests.support.built import hooked

ROOT = Path(__file__).parents[2]
ROLES = {
    "writer": "writers.writer_dies",
    "writer after a release": "writers.releasing_writer_dies",
    "writer with late readers": "writers.writer_of_late_readers_dies",
    "writer of bursts": "writers.writer_of_bursts_dies",
    "reader": "readers.reader_dies",
    "reader of batches": "readers.reader_of_batches_dies",
    "replacement of a reader": "readers.replacement_dies",
    "late reader": "readers.late_reader_dies",
    "reader of the latest": "latest.reader_dies",
    "writer of the latest": "latest.writer_dies",
    "creator of a ring": "creators.creator_dies",
    "attacher of a ring": "creators.attacher_dies",
    "sweeper": "creators.sweeper_dies",
    "storage writer": "stores.storer_dies",
    "storage reader": "stores.getter_dies",
    "last storage reader": "stores.last_comer_dies",
    "creator of a region": "regions.creator_dies",
    "creator of a region that is joined": "regions.creator_dies_beside_another",
    "only participant of a region": "regions.participant_dies",
    "joiner of a region": "regions.joiner_dies",
    "replacer of a dead region": "regions.replacer_dies",
}
PASSAGES = int(os.environ.get("MEMLANE_SOAK_PASSAGES", "1"))
SECONDS = 900  # until a role is given up; a minute is usual
pytestmark = [pytest.mark.soak(seconds=SECONDS), pytest.mark.usefixtures("hooks")]


def scenario_of(role: str) -> Callable[[Spot | None], tuple[list[Passage], str]]:
    """The scenario in which that role dies."""
    module, name = ROLES[role].split(".")
    hooks: Hooks = _native.sync_hooks  # type: ignore[attr-defined]
    return partial(getattr(import_module(f"tests.crash.{module}"), name), hooks)


def crash(_link: Link, role: str) -> list[Crash]:
    """Role: all deaths of that role, one after the other."""
    start_control()
    return crash_everywhere(scenario_of(role), PASSAGES)


def passages_of(_link: Link) -> set[str]:
    """Role: all points that the roles pass if none dies."""
    start_control()
    return {point for role in ROLES for _, point, _ in scenario_of(role)(None)[0]}


@pytest.mark.parametrize("role", ROLES)
def test_a_death_at_every_point_loses_nothing(role: str) -> None:
    """After every death: the right error in time, nothing lost, repeated or left behind."""
    crashes = start(crash, role, method="spawn", command=hooked()).result(SECONDS)
    print()
    for one in crashes:
        spot = one.spot
        print(f"| {role} | {spot.stage} | {spot.point} | {spot.passage} | {one.seen} |")
    points = {one.spot.point for one in crashes}
    print(f"{role}: {len(crashes)} deaths at {len(points)} points")


def test_no_hooks_in_what_is_released() -> None:
    """The release build has neither the hooks nor calls of them."""
    assert not hasattr(_native, "sync_hooks")
    assert _native.__file__ is not None
    assert b"publish.store" not in Path(_native.__file__).read_bytes()


def named_points() -> set[str]:
    """All sync points of the native code."""
    code = "".join(
        path.read_text()
        for path in (ROOT / "native").rglob("*.hpp")
        if path.parent.name != "tests" and path.name != "sync.hpp"
    )
    return {
        name + {"STEP": "", "STORE": ".store", "LOAD": ".load"}[kind]
        for kind, name in re.findall(r"SYNC_(STEP|STORE|LOAD)\((\w+)\);", code)
    }


def test_every_point_of_the_code_is_among_them() -> None:
    """Some role passes each point, so there is a death at each."""
    named = named_points()
    assert len(named) > 20
    passed = start(passages_of, method="spawn", command=hooked()).result(SECONDS)
    assert passed == named
