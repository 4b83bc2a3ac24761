"""What all engine tests need: the distributions, and a longer deadline."""

import pytest

from tests.engines import sources
from tests.support.missing import package


def pytest_itemcollected(item: pytest.Item) -> None:
    """Each of their many processes imports torch, which takes its time on a busy machine."""
    item.add_marker(pytest.mark.soak(seconds=600))


@pytest.fixture(scope="session", autouse=True)
def _fetched() -> None:
    package("torch")
    for release in sources.USUAL:
        sources.fetch(release)
