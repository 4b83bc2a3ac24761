"""vLLM's own manager and base classes with memlane's disk tier and policy."""

from functools import partial

from tests.engines import running
from tests.engines.running import RELEASES

run = partial(running.run, file="vllm_tier_scenarios")


@RELEASES
def test_the_tier_works_without_vllms_manager(release: str) -> None:
    """Its configuration, files, jobs, holds, metrics and end, without vLLM's manager."""
    run(
        *("keys_of_its_configuration", "namespaces", "openers", "hashes_that_do_not_last"),
        *("store_and_load", "a_corrupt_block", "a_declined_block", "a_load_that_expires"),
        *("holds", "draining", "the_end", "metrics", "a_tuned_tier_learns", "several_disks"),
        release=release,
    )


@RELEASES
def test_blocks_that_memory_evicted_come_back(release: str) -> None:
    """Blocks that memory has evicted come back, right or not at all; and what it evicts."""
    run(
        *("evicted_and_promoted", "corrupt_and_promoted", "too_late_and_promoted"),
        *("more_than_fits", "reset", "a_reset_that_keeps"),
        *("evicts_all_or_none", "the_end_goes_before_the_start", "pinned_chunks_stay"),
        *("removed_and_cleared", "used_chunks_outlive_others", "random_traffic"),
        release=release,
    )


@RELEASES
def test_what_routers_are_told(release: str) -> None:
    """Each block that is stored or found, and each that is gone, once."""
    run(
        *("events_are_off_unless_vllm_wants_them", "events_of_stores_and_evictions"),
        *("events_of_declined_blocks", "events_of_blocks_that_are_lost", "events_after_a_restart"),
        *("events_of_a_reset", "events_that_nobody_takes", "events_behind_vllms_manager"),
        release=release,
    )
