"""The few things that are asked of a ZeroMQ socket, by the shortest way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import zmq
from zmq.backend import Socket as _Plain

if TYPE_CHECKING:
    AnySocket = zmq.Socket[bytes]

MORE = int(zmq.SNDMORE | zmq.DONTWAIT)
LAST = int(zmq.DONTWAIT)

# What `zmq.Socket` adds to these (tracking, serializing) costs as much as they do.
send: Callable[..., Any] = _Plain.send
"""send(socket, part, flags, copy=True); for what is sent without a copy see `lending`."""
receive: Callable[..., Any] = _Plain.recv
"""receive(socket, flags, copy=True); raises `zmq.Again` if nothing is there"""


def can_receive(socket: AnySocket) -> bool:
    """Is there a frame? Asking also takes back the signal of the socket's descriptor."""
    return bool(cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN)


def signal_of(socket: AnySocket) -> int:
    """The descriptor that tells of news: readable once after nothing was there to receive."""
    return cast("int", socket.get(zmq.FD))
