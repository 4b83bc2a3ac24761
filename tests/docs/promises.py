"""The test, within `tests`, of each promise about a call on the manual's page of guarantees.

A call that ends in a way that is not listed cannot end so, and the page says why.
"""

TESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "`enqueue`, `aenqueue`": {
        "interrupted": (
            "broadcast/test_signals.py::test_a_call_that_a_handler_has_left_has_sent_nothing",
        ),
        "timed out": ("broadcast/test_timeouts.py::test_a_timeout_of_enqueue_sends_nothing",),
        "cancelled": ("broadcast/test_awaiting.py::test_cancelled_sends_send_nothing",),
        "death": (
            "broadcast/test_reader_death.py::test_a_writer_that_is_blocked_on_a_full_ring_learns_of_a_death",
        ),
    },
    "`enqueue_many`": {
        "interrupted": (
            "broadcast/test_bursts.py::test_an_interrupted_burst_says_how_many_were_sent",
        ),
        "timed out": (
            "broadcast/test_bursts.py::test_a_burst_that_times_out_says_how_many_were_sent",
        ),
        "death": ("broadcast/test_bursts.py::test_a_dead_reader_ends_a_burst",),
    },
    "`dequeue_many`, `adequeue_many`, also of a `Gather`": {
        "interrupted": (
            "broadcast/test_bursts.py::test_a_reader_of_batches_loses_nothing_to_a_handler",
        ),
        "timed out": (
            "broadcast/test_bursts.py::test_a_batch_waits_for_one_message",
            "broadcast/test_bursts.py::test_one_call_returns_a_message_of_each_writer",
        ),
        "cancelled": ("broadcast/test_bursts.py::test_awaited_calls_return_what_plain_calls_do",),
        "death": ("broadcast/test_bursts.py::test_a_killed_writer_s_bursts_are_read_first",),
    },
    "`dequeue`, `adequeue`": {
        "interrupted": (
            "broadcast/test_signals.py::test_a_handler_that_raises",
            "broadcast/test_signals.py::test_a_reader_loses_nothing_to_a_handler",
            "broadcast/test_signals.py::test_a_view_that_was_taken_is_in_its_block_before_a_handler_can_raise",
            "broadcast/test_decoding_failures.py::test_a_handler_s_error_loses_no_message",
        ),
        "timed out": ("broadcast/test_timeouts.py::test_a_timeout_of_dequeue_consumes_nothing",),
        "cancelled": ("broadcast/test_awaiting.py::test_cancelled_receives_consume_nothing",),
        "death": ("broadcast/test_writer_death.py::test_a_full_ring_is_read_to_its_end",),
    },
    "`enqueue` of a `Gather`": {
        "interrupted": (
            "broadcast/test_signals.py::test_a_call_that_a_handler_has_left_has_sent_nothing",
        ),
        "timed out": ("broadcast/test_gather.py::test_a_writer_waits_for_room",),
        "death": ("broadcast/test_gather.py::test_writers_learn_that_the_reader_died",),
    },
    "`dequeue`, `adequeue` of a `Gather`": {
        "interrupted": (
            "broadcast/test_gather.py::test_whatever_else_raises",
            "broadcast/test_signals.py::test_a_reader_loses_nothing_to_a_handler",
        ),
        "timed out": ("broadcast/test_gather.py::test_timeout_and_cancel_end_a_wait",),
        "cancelled": ("broadcast/test_gather.py::test_awaited_calls_return_what_plain_calls_do",),
        "death": ("broadcast/test_gather.py::test_a_dead_writer_raises_until_it_is_released",),
    },
    "`put`": {
        "interrupted": (
            "store/test_signals.py::test_an_interrupted_call_leaves_nothing_half_done",
        ),
        "death": ("store/test_deaths.py::test_a_dead_reader_gives_back_what_it_owed_and_pinned",),
    },
    "`get`, `view`": {
        "interrupted": (
            "store/test_signals.py::test_an_interrupted_call_leaves_nothing_half_done",
        ),
        "death": ("store/test_deaths.py::test_the_writer_dies",),
    },
    "`SharedOffloadRegion`": {
        "interrupted": ("offload/test_refused.py::test_an_interrupted_wait_leaves_nothing",),
        "timed out": (
            "offload/test_races.py::test_waiting_for_a_stopped_creator_ends_at_the_timeout",
        ),
        "death": ("offload/test_races.py::test_the_creator_dies_while_others_wait",),
    },
    "`cleanup` of a region": {
        "interrupted": ("offload/test_pin.py::test_cleanup_that_was_interrupted",),
        "death": ("offload/test_life_processes.py::test_the_leftover_of_a_kill_is_replaced",),
    },
    "`copy_blocks`": {
        "interrupted": (
            "offload/test_copy_blocks_threads.py::test_a_handler_that_raises_ends_the_helpers",
        ),
    },
    "`store`, `load` of a disk tier": {
        "interrupted": ("tiers/test_interrupted_calls.py::test_what_was_begun_is_reported_once",),
        "timed out": ("tiers/test_disk_tier_faults.py::test_a_disk_that_does_not_answer",),
        "death": ("tiers/test_disk_tier_kills.py::test_a_process_that_stores_is_killed",),
    },
    "`store`, `load` of a tier on a server": {
        "interrupted": ("tiers/test_interrupted_calls.py::test_what_was_begun_is_reported_once",),
        "timed out": (
            "support/remote_tiers.py::test_a_stopped_server_is_skipped_until_it_answers",
        ),
        "death": ("support/remote_tiers.py::test_a_killed_server_is_stored_to_again",),
    },
    "`poll`": {
        "interrupted": ("tiers/test_interrupted_calls.py::test_no_report_is_lost",),
    },
    "`forget`, `clear`": {
        "interrupted": ("tiers/test_interrupted_calls.py::test_a_block_is_forgotten_or_right",),
        "timed out": (
            "tiers/test_disk_tier_faults.py::test_a_disk_that_hangs_stops_no_thread",
            "tiers/test_remote_tier.py::test_a_forgotten_key_that_was_late_is_an_error",
        ),
        "death": ("support/remote_tiers.py::test_forget_and_clear_fail_without_a_server",),
    },
    "`fetch` of a chain": {
        "interrupted": ("tiers/test_tier_chain.py::test_handlers_that_raise",),
        "timed out": ("tiers/test_tier_chain.py::test_a_fetch_does_not_wait_longer_than_it_may",),
        "death": ("tiers/test_tier_chain.py::test_a_tier_that_fails",),
    },
    "`close` of a chain": {
        "interrupted": (
            "tiers/test_tier_chain.py::test_a_close_that_is_interrupted_is_done_by_the_next",
        ),
        "timed out": (
            "tiers/test_tier_chain.py::test_it_is_not_closed_while_blocks_are_under_way",
        ),
        "death": ("tiers/test_tier_chain.py::test_a_tier_that_is_closed_meanwhile",),
    },
}
