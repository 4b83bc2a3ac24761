"""Makes the tables and the picture of a run."""

from __future__ import annotations

COLUMNS = (
    ("one way p50", "p50_us", "us"),
    ("slowest p50", "slowest_us", "us"),
    ("p99", "p99_us", "us"),
    ("messages/s", "messages_s", ""),
    ("GB/s", "gb_s", ""),
    ("idle", "idle_percent", "%"),
)
PANELS = (
    ("dict", 1, "p50_us", "one way, 225 B dict, 1 sleeping reader (less is better)", "us"),
    ("dict", 4, "p50_us", "one way, 225 B dict, 4 sleeping readers (less is better)", "us"),
    ("array-1m", 1, "gb_s", "1 MiB array, back to back, 1 reader (more is better)", "GB/s"),
    ("array-1m", 4, "gb_s", "1 MiB array, back to back, 4 readers (more is better)", "GB/s"),
)
