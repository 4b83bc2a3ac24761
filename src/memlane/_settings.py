"""Environment variables, read on every use, so that they can be changed at any time."""

from __future__ import annotations

import os

# The second is vLLM's, which its users may have set.
INTERVAL_SETTINGS = ("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "VLLM_RINGBUFFER_WARNING_INTERVAL")
DEFAULT_INTERVAL = 5.0

_complained_of: set[str] = set()


def warning_interval() -> float:
    """Seconds until a wait is first logged; may be a fraction."""
    name = next((name for name in INTERVAL_SETTINGS if os.environ.get(name)), None)
    if name is None:
        return DEFAULT_INTERVAL
    text = os.environ[name]
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # At most a year: the setting may be infinite.
    if seconds > 0:
        return min(seconds, 3.2e7)
    if text in _complained_of:
        return DEFAULT_INTERVAL
    _complained_of.add(text)
    import logging  # imported late: only a wrong setting needs it

    logging.getLogger("memlane").warning(
        "%s=%r is not a positive number of seconds; using %s", name, text, DEFAULT_INTERVAL
    )
    return DEFAULT_INTERVAL
