"""ZeroMQ's part that queues and groups share; nothing here depends on what a message contains."""
