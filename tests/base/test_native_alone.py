"""The native module without the Python modules that install errors and functions in it."""

import pytest

from memlane import errors
from memlane._native import install, install_errors

pytestmark = pytest.mark.unit


def test_a_table_without_a_class_is_refused() -> None:
    """At once, and what was installed before stays."""
    table = {name: value for name, value in vars(errors).items() if name != "ViewInUse"}
    with pytest.raises(ValueError, match="no class ViewInUse"):
        install_errors(table)
    with pytest.raises(ValueError, match="no class ViewInUse"):
        install_errors({**table, "ViewInUse": "ViewInUse"})


def test_functions_that_nobody_calls_are_refused() -> None:
    """So are objects that cannot be called."""
    with pytest.raises(ValueError, match="cannot be installed as failures"):
        install(failures=print)
    with pytest.raises(ValueError, match="3 cannot be installed as failure"):
        install(failure=3)  # type: ignore[arg-type]
