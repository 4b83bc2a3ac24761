"""Makes the tables and the picture of a run."""

from __future__ import annotations

COLUMNS = (
    ("put cold", "put_cold_us", "us"),
    ("put warm", "put_us", "us"),
    ("get, copy", "get_us", "us"),
    ("get, view", "view_us", "us"),
    ("put to got", "way_us", "us"),
)
PANELS = (
    ("array-1m", 1, "put_us", "put a 1 MiB array (less is better)", "us"),
    ("array-1m", 1, "view_us", "get a 1 MiB array by view (less is better)", "us"),
    ("array-8m", 4, "way_us", "8 MiB array, from put until 4 readers have it", "us"),
    ("tensors", 4, "way_us", "dict of 5 tensors, from put until 4 readers have it", "us"),
)
