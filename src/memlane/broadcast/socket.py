"""Objects from a ZeroMQ socket that the caller made and trusts."""

from __future__ import annotations

import pickle
from math import ceil, isnan
from typing import TYPE_CHECKING, Any

from memlane.errors import InvalidArgument, TimedOut

if TYPE_CHECKING:
    import zmq


def receive_pickled(socket: zmq.Socket[bytes], timeout: float | None) -> Any:
    """The next message of the socket, unpickled. Does not change the socket's options."""
    if timeout is not None and isnan(timeout):
        raise InvalidArgument("timeout must be a number of seconds or None, not NaN")
    # ZeroMQ counts milliseconds in 32 bits; 24 days are the most.
    longest = 0x7FFFFFFF
    milliseconds = None if timeout is None else min(max(timeout, 0) * 1000, longest)
    if not socket.poll(None if milliseconds is None else ceil(milliseconds)):
        raise TimedOut(f"no message on the socket within {timeout} s", timeout)
    return pickle.loads(socket.recv())
