"""What is asked of a ZeroMQ socket before each wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import zmq

if TYPE_CHECKING:
    AnySocket = zmq.Socket[bytes]


def can_receive(socket: AnySocket) -> bool:
    """Is there a frame? Asking also takes back the signal of the socket's descriptor."""
    return bool(cast("int", socket.get(zmq.EVENTS)) & zmq.POLLIN)


def signal_of(socket: AnySocket) -> int:
    """The descriptor that tells of news: readable once after `can_receive` has said no."""
    return cast("int", socket.get(zmq.FD))
