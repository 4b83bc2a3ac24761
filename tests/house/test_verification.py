"""The smallest model holds, and fails when weakened. All of them: `make verify`."""

import re
import shutil
from pathlib import Path

import pytest
from verification import verify
from verification.cases import BASES, VARIANTS, Run, Variant

from tests.support.missing import needed

ROOT = Path(__file__).parents[2]

needs_spin = needed("spin", bool(shutil.which("spin") and shutil.which("cc")))
SMALLEST = Run("ring", "CHUNKS=1 READERS=1")
WEAKENED = Run("ring", "CHUNKS=1 READERS=1 PUBLISH_RELAXED")
ASLEEP = Run("wait", "CAPACITY=1 READERS=1 NO_FENCE_IN_WAIT", liveness=True)


@needs_spin
def test_model_holds() -> None:
    """The flags of the ring, as the code has them."""
    assert verify.judge(SMALLEST).is_right


@needs_spin
@pytest.mark.parametrize(
    ("run", "property_name"), [(WEAKENED, "whole_and_next"), (ASLEEP, "every_sleeper_is_woken")]
)
def test_weakened_model_is_caught_by_its_property(run: Run, property_name: str) -> None:
    """A relaxed store exposes an incomplete chunk; without its fence a sleeper sleeps on."""
    assert verify.judge(Variant("", "", run, property_name)).is_right


@needs_spin
def test_model_that_cannot_be_run_is_wrong() -> None:
    """A search that proves nothing counts as a failure."""
    assert not verify.judge(Run("ring", "CHUNKS=1")).is_right


def test_what_must_be_is_asked() -> None:
    """A variant that holds, one that fails another property, and a base that fails are wrong."""
    variant = Variant("", "", WEAKENED, "whole_and_next")
    holds, fails = verify.Outcome(None, 1, 0), verify.Outcome("all_before_end", 1, 0)
    assert not verify.verdict_of(variant, holds).is_right
    assert not verify.verdict_of(variant, fails).is_right
    assert not verify.verdict_of(SMALLEST, fails).is_right
    assert verify.verdict_of(SMALLEST, holds).is_right


def test_search_that_is_cut_short_proves_nothing() -> None:
    """Only a complete search, or a violation, is a result."""
    whole = "depth reached 9, errors: 0\n 7 states, stored\n"
    assert verify.outcome_of(whole, 0).states == 7
    for cut in (
        "error: max search depth too small\n" + whole,
        "Search not completed\n" + whole,
        "",
    ):
        with pytest.raises(verify.Unusable):
            verify.outcome_of(cut, 0)


def test_every_case_weakens_something() -> None:
    """Models test the macros that their cases define, and no others."""
    runs = [*BASES, *(case.run for case in VARIANTS)]
    for model in {run.model for run in runs}:
        text = (ROOT / "verification" / f"{model}.pml").read_text()
        asked = set(re.findall(r"^#ifn?def (\w+)", text, re.MULTILINE))
        asked |= set(re.findall(r"defined\((\w+)\)", text))
        words = {word for run in runs if run.model == model for word in run.defines.split()}
        assert {word for word in words if "=" not in word} == asked - {"LIVENESS"}
