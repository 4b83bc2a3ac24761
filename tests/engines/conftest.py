"""What the tests need from the network comes before the first of them, whose time is limited."""

import pytest

from tests.engines import sources


@pytest.fixture(scope="session", autouse=True)
def _fetched() -> None:
    for release in sources.PACKAGES:
        sources.fetch(release)
