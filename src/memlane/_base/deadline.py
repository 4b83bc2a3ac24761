"""The one rule for timeouts, and the deadline of a call. Native code has the same rule, and asks
`seconds_of` about everything but None, floats and ints."""

from __future__ import annotations

import time
from math import inf, isnan, ldexp, nan

from memlane.errors import InvalidArgument, InvalidType

_LONGEST = 3.2e7  # a year: waits that take a timeout in C overflow far beyond it


class Fallback(float):
    """A timeout in seconds that counts unless what is waited for has a timeout of its own."""


def seconds_of(timeout: float | None) -> float:
    """`timeout` as seconds: 0, which polls, if it is negative, and infinite if it is None.

    Raises:
        InvalidType: it is a bool, or no number.
        InvalidArgument: it is NaN.
    """
    if timeout is None:
        return inf
    # Numbers of numpy count as well, so its bools have to be told from them.
    if isinstance(timeout, bool) or getattr(getattr(timeout, "dtype", None), "kind", "") == "b":
        raise InvalidType(f"timeout must be a number of seconds or None, not {timeout!r}")
    try:
        seconds = ldexp(timeout, 0)  # as float(), which would also read text
    except TypeError:
        kind = type(timeout).__name__
        raise InvalidType(f"timeout must be a number of seconds or None, not {kind}") from None
    except OverflowError:  # an integer beyond all floats
        return inf if timeout > 0 else 0.0
    except ValueError:  # a decimal that is a signaling NaN
        seconds = nan
    if isnan(seconds):
        raise InvalidArgument("timeout must be a number of seconds or None, not NaN")
    return max(seconds, 0.0)


class Deadline:
    """The moment at which a call has to end.

    Attributes:
        timeout: from which it was made, for the call's error.
        end: on the clock `time.monotonic()`; infinite if the call may take for ever.
    """

    __slots__ = ("end", "timeout")

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.end = inf if timeout is None else time.monotonic() + seconds_of(timeout)

    def left(self, most: float = inf) -> float:
        """Seconds until the deadline, from 0 to `most`."""
        if self.end == inf:
            return most
        return min(most, max(0.0, self.end - time.monotonic()))

    def timeout_left(self) -> float | None:
        """The same as the timeout of another call: None if it is more than a year."""
        if self.end == inf:
            return None
        left = self.left()
        return None if left > _LONGEST else left

    def has_passed(self) -> bool:
        """Returns whether the call has to end now."""
        return self.end != inf and time.monotonic() >= self.end


NEVER = Deadline(None)
