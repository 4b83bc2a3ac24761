"""Those of vLLM 0.33's own tests that cannot run on memlane's systems, and why.

All tests of its store and of its byte ring run. Tiers are tested by the tests of the example tier,
of the file tier and of the memory before them, in which `swapped_tiers` exchanges the classes.
"""

SPIN = "sets or counts what SpinCondition does, which memlane's native wait has not"
COUNTS = "counts calls of vLLM's own pickling or of its socket for large messages"
ARENA = "is about vLLM's tensor arena, which the adapter accepts and does not use"
SPACE = "is about vLLM's check of free space before vLLM's own ring or arena is made"
POPULATES = "patches or counts how vLLM's class populates pages; memlane's native threads do it"
SYSTEM = "patches the system calls that vLLM's class makes in Python"
CHECKS = "patches vLLM's check of free space; memlane has one of its own"
MEDIUM = "expects the example tier's medium, which is memory"
FILES = "patches the system calls of vLLM's file tier, or looks into its threads or files"
EVENTS = "expects events of stored blocks; memlane's tier reports none"
LRU = "looks into vLLM's LRU, or expects its order of the chunks of a request that goes on"

# Patterns of names; every one must still match a test.
LEFT_OUT = {
    "test_message_queue_shutdown_busy": SPIN,
    "test_message_queue_shutdown_idle": SPIN,
    "test_message_queue_idle_wake": SPIN,
    "test_message_queue_busy_to_idle": SPIN,
    "test_reader_timeout_caps_indefinite_waits*": "asks a private class for its next pause",
    "test_reader_rechecks_shm_after_idle_wait_timeout_without_notify": SPIN,
    "test_busy_reader_consumes_write_notifications": SPIN,
    "test_tensor_broadcast": COUNTS,
    "test_broadcast_retains_values_after_ring_reuse*inline*": COUNTS,
    "test_broadcast_retains_values_after_ring_reuse*overflow*": COUNTS,
    "test_warning_logs": "sets a private constant, and compares one text; memlane names the peers",
    "test_remote_subscribe_addr_unique_concurrent_writers": "closes the queue's own sockets",
    "test_mq_bind_with_non_local_ip_fails": "expects a ZMQError; memlane's names the address",
    "test_*arena*": ARENA,
    "test_check_shm_free_space*": SPACE,
    "test_shm_ring_buffer_creation_checks_free_space": SPACE,
    # Of the region.
    "test_madvise_*": POPULATES,
    "test_populate_shard_prefaults_only_its_share*": POPULATES,
    "test_pin_mmap_region_worker_slot_only_registers_own_slots": POPULATES,
    "test_mp_barrier_unlinks_file_and_survives_sigkill*": POPULATES,
    "test_setup_failure_before_barrier_releases_peers?p*": POPULATES,
    "test_setup_failure_before_barrier_releases_peers?shm*": CHECKS,
    "test_barrier_release_failure_keeps_original_error?population?": POPULATES,
    "test_barrier_release_failure_keeps_original_error?shm?": CHECKS,
    "test_insufficient_space_raises_clear_error": CHECKS,
    "test_ftruncate_failure_cleans_up_creator": SYSTEM,
    "test_mmap_failure_unlinks_creator_before_releasing_peers": SYSTEM,
    "test_segmented_region_maps_files_back_to_back": "sets a private constant; one file is enough",
    "test_multiprocess_race_construct_and_write": "opens vLLM's file by name; a folder here",
    "test_cleanup_keeps_region_mapped_while_buffers_are_exported": (
        "expects the mmap object to stay open; memlane's memory stays with each export of it"
    ),
    # Of tiers.
    "test_pre_registered_tiers_can_be_imported": MEDIUM,
    "test_register_new_tier_type*": MEDIUM,
    "test_tier_filter_skips_filtered_secondary?non_matching_medium?": MEDIUM,
    "test_tier_filter_allows_matching_secondary?explicit_cpu?": MEDIUM,
    "test_config_info_keys_match_the_filled_values": "asks for a label that only the example has",
    "test_store_accepts_block_published_by_another_writer": FILES,
    "test_shutdown_discards_pending_tasks": FILES,
    "test_store_load_roundtrip_without_o_direct": FILES,
    "test_batch_lookup_*": FILES,
    "test_failed_load_corrects_verdict_and_removes_corrupt_file*": FILES,
    "test_failed_load_after_abort_does_not_break_newer_probe": FILES,
    "test_batched_*load_*": FILES,
    "test_transient_load_failure_leaves_file*": FILES,
    "test_out_of_bounds_block_id_smoke*": "expects a failed job of a row that does not exist",
    "test_fs_tier_cross_tp_round_trip": "memlane's blocks are of one number of workers",
    "test_*emit*_event*": EVENTS,
    "test_store_event_uses_configured_locality*": EVENTS,
    "test_events_*": EVENTS,
    # Of the policy.
    "test_cpu_manager": LRU,
    "test_lru_batch_eviction_failure_is_atomic": LRU,
    "test_lru_repeated_pin_cycles_compact_lazy_heap_entries": LRU,
    "test_lru_failed_store_retry_preserves_prefix_order": LRU,
    "test_lru_incremental_stores_do_not_rescan_the_prefix": LRU,
    "test_unfinished_lru_*": LRU,
    "test_request_key_positions_order_tails_across_kv_groups": LRU,
    "test_touch_propagates_to_all_tiers": LRU,
}
