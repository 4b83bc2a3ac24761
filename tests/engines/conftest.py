"""The needs of all engine tests: the distributions, and a longer deadline."""

from importlib.util import find_spec

import pytest

from tests.engines import sources, warm
from tests.support.missing import needs


def pytest_itemcollected(item: pytest.Item) -> None:
    """They start many processes, which takes its time on a busy machine."""
    item.add_marker(pytest.mark.soak(seconds=600))


@pytest.fixture(scope="session", autouse=True)
def _fetched() -> None:
    if find_spec("torch") is None:  # imported it is by what plays the scenarios
        pytest.skip(needs("torch"))
    for release in sources.USUAL:
        sources.fetch(release)


@pytest.fixture(scope="module", autouse=True)
def _warm(request: pytest.FixtureRequest) -> None:
    """Before the first test looks at what it has not left behind."""
    if hasattr(request.module, "run"):
        warm.server()
