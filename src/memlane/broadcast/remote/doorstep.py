"""Connections whose other end has not said who it is: only so many at a time.

libzmq ends those that are not through within the time of a handshake, and counts none. So a
stranger who connects again and again could take all descriptors of the process meanwhile.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from collections.abc import Iterable

    from memlane.broadcast.remote.peer import Peer

EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED
MOST = 128
"""So many, and two for each expected reader: all of those may come at once."""


class Doorstep:
    """Follows the connections of a listener on `port`."""

    def __init__(self, places: int, port: int) -> None:
        self._most = MOST + 2 * places
        self._port = port
        self._waiting: dict[int, None] = {}  # descriptors of libzmq's, the oldest first

    def note(self, event: int, descriptor: int) -> None:
        """What libzmq's monitor tells."""
        if event == zmq.EVENT_ACCEPTED:
            self._waiting[descriptor] = None
        else:
            self._waiting.pop(descriptor, None)

    def clear(self, peers: Iterable[Peer]) -> None:
        """Ends the oldest if there are too many; call it when all that happened was noted."""
        if len(self._waiting) <= self._most:
            return
        for peer in peers:
            if peer.connection is not None:
                self._waiting.pop(peer.connection.descriptor, None)
        while len(self._waiting) > self._most:
            self._end(next(iter(self._waiting)))

    def _end(self, descriptor: int) -> None:
        """libzmq then sees its end. If it has closed it by itself, the number may be another file's
        by now, or another connection's: a reader would make that again."""
        del self._waiting[descriptor]
        with suppress(OSError), socket.socket(fileno=descriptor) as found:
            try:
                if found.getsockname()[1] == self._port:
                    found.shutdown(socket.SHUT_RDWR)
            finally:
                found.detach()
