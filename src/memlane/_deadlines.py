"""Timeouts as callers give them, and as deadlines."""

from __future__ import annotations

import time
from math import inf, isnan

from memlane.errors import InvalidArgument, InvalidType


def seconds_of(timeout: float | None) -> float:
    """`timeout` as a float, not below 0: what has passed already polls. Infinite for None."""
    if timeout is None:
        return inf
    try:
        if isnan(timeout):
            raise InvalidArgument("timeout must be a number of seconds or None, not NaN")
        return max(float(timeout), 0.0)
    except TypeError:
        raise InvalidType("timeout must be a number of seconds or None") from None
    except OverflowError:  # an integer beyond all floats
        return inf if timeout > 0 else 0.0


def deadline_of(timeout: float | None) -> float | None:
    """The time of `time.monotonic()` when `timeout` ends; None for never."""
    seconds = seconds_of(timeout)
    return None if seconds == inf else time.monotonic() + seconds


def remaining(deadline: float | None) -> float | None:
    """Seconds until `deadline`, not below 0; None for ever."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
