"""Those of vLLM 0.33's own tests that cannot run on memlane's systems, and why.

All tests of its store and of its byte ring run.
"""

SPIN = "sets or counts what SpinCondition does, which memlane's native wait has not"
COUNTS = "counts calls of vLLM's own pickling or of its socket for large messages"
ARENA = "is about vLLM's tensor arena, which the adapter accepts and does not use"
SPACE = "is about vLLM's check of free space before vLLM's own ring or arena is made"
POPULATES = "patches or counts how vLLM's class populates pages; memlane's native threads do it"
SYSTEM = "patches the system calls that vLLM's class makes in Python"
CHECKS = "patches vLLM's check of free space; memlane has one of its own"

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
}
