"""SGLang's own storage factory and host pools with memlane's tiers."""

from functools import partial

import pytest

from tests.engines import running
from tests.support.missing import package
from tests.support.redis_servers import REFUSAL

run = partial(running.run, release="0.5", file="sglang_tier_scenarios")


@pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)
def test_a_storage_backends_pages_come_back_right_or_not_at_all() -> None:
    """Pages come back right or not at all, to whom they are; two threads call at once."""
    package("redis")
    run("configurations", "pages_come_back", "whose_pages", "a_server_that_ends", "two_threads")


def test_a_disk_tier_keeps_sglangs_pages() -> None:
    run("on_a_disk")
