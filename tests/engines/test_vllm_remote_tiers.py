"""vLLM's own manager and base classes with memlane's tiers on real servers."""

from functools import partial

import pytest

from tests.engines import running
from tests.engines.running import RELEASES
from tests.support import mooncake_servers, redis_servers
from tests.support.missing import package

run = partial(running.run, file="vllm_remote_tier_scenarios")
REDIS = pytest.mark.skipif(bool(redis_servers.REFUSAL), reason=redis_servers.REFUSAL)
MOONCAKE = pytest.mark.skipif(bool(mooncake_servers.REFUSAL), reason=mooncake_servers.REFUSAL)


@pytest.fixture(autouse=True)
def _clients() -> None:
    for name in ("redis", "obstore"):
        package(name)


@REDIS
@RELEASES
def test_a_redis_tier_works_without_vllms_manager(release: str) -> None:
    """Its configuration, jobs, questions, figures and end, without vLLM's manager."""
    run(
        *("what_front_ends_import", "keys_of_each_configuration", "secrets"),
        *("one_server_for_several_engines", "on_redis", "questions_go_together"),
        *("steps_that_take_long", "answers_that_never_come"),
        *("questions_that_are_refused", "evicted_before_it_is_loaded", "wrong_values"),
        *("events_of_a_server", "events_of_more_than_is_remembered", "the_end_of_it"),
        release=release,
    )


@REDIS
@RELEASES
def test_blocks_that_memory_evicted_come_back(release: str) -> None:
    """Blocks that memory has evicted come back, whatever becomes of the server; with a disk before
    it, too."""
    run(
        *("evicted_from_memory", "killed_in_the_middle", "stopped_in_the_middle"),
        *("loads_that_are_refused", "wrong_and_promoted", "a_disk_and_a_server"),
        "reset_while_blocks_are_under_way",
        "reset_one_after_the_other",
        "reset_without_a_server",
        release=release,
    )


@RELEASES
def test_replicas_share_a_folder(release: str) -> None:
    run("replicas_that_share_a_folder", release=release)


@RELEASES
def test_an_object_tier_works_under_vllm(release: str) -> None:
    run("in_a_bucket", release=release)


@MOONCAKE
@RELEASES
def test_a_mooncake_tier_works_under_vllm(release: str) -> None:
    run("on_mooncake", release=release)
