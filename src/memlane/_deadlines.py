"""Timeouts as callers give them, and as deadlines."""

from __future__ import annotations

import time
from math import isnan

from memlane.errors import InvalidArgument, InvalidType


def deadline_of(timeout: float | None) -> float | None:
    """The time of `time.monotonic()` when `timeout` ends; None for never."""
    if timeout is None:
        return None
    try:
        if isnan(timeout):
            raise InvalidArgument("timeout must be a number of seconds or None, not NaN")
    except TypeError:
        raise InvalidType("timeout must be a number of seconds or None") from None
    except OverflowError:  # an integer beyond all floats
        return None
    return time.monotonic() + max(float(timeout), 0.0)


def remaining(deadline: float | None) -> float | None:
    """Seconds until `deadline`, not below 0; None for ever."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
