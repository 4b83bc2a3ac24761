"""Converts timeouts to seconds and to deadlines."""

from __future__ import annotations

import time
from math import inf, isnan

from memlane.errors import InvalidArgument, InvalidType


def seconds_of(timeout: float | None) -> float:
    """`timeout` as a float; 0, which polls, if it is negative, and infinite if it is None."""
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
    """The value of `time.monotonic()` at which `timeout` expires; None if it never does."""
    seconds = seconds_of(timeout)
    return None if seconds == inf else time.monotonic() + seconds


def remaining(deadline: float | None) -> float | None:
    """Seconds until `deadline`, at least 0; None if there is no deadline."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())
