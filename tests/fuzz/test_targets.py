"""Every fuzz target for a moment; `make fuzz` runs them longer."""

import pytest

from tests.fuzz.__main__ import IN_CPP, IN_PYTHON, run


@pytest.mark.parametrize("target", [*IN_CPP, *IN_PYTHON])
def test_a_target_finds_nothing(target: str) -> None:
    """Its seeds, and changes of them, cause no fault."""
    assert run(target, 1.5)
