"""Those of vLLM 0.33's own tests of the queue that do not run on memlane's, and why."""

SPIN = "sets or counts what SpinCondition does, which memlane's native wait has not"
COUNTS = "counts calls of vLLM's own pickling or of its socket for large messages"
ARENA = "is about vLLM's tensor arena, which the adapter accepts and does not use"
SPACE = "is about vLLM's check of free space before vLLM's own ring or arena is made"

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
}
