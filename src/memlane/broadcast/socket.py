"""Objects from a ZeroMQ socket that the caller made and trusts."""

from __future__ import annotations

import pickle
from math import ceil, inf
from typing import TYPE_CHECKING, Any

from memlane._base.deadline import seconds_of
from memlane.errors import TimedOut

if TYPE_CHECKING:
    import zmq


def receive_pickled(socket: zmq.Socket[bytes], timeout: float | None) -> Any:
    """The next message of the socket, unpickled. Does not change the socket's options."""
    seconds = seconds_of(timeout)
    # ZeroMQ takes milliseconds as a 32-bit int, so 24 days at most.
    if not socket.poll(None if seconds == inf else ceil(min(seconds * 1000, 0x7FFFFFFF))):
        raise TimedOut(f"no message on the socket within {timeout} s", timeout)
    return pickle.loads(socket.recv())
