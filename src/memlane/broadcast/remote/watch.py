"""What a reader sees of the connection to its writer."""

from __future__ import annotations

import time
from contextlib import suppress

import zmq

from memlane.broadcast.remote.tcp import Connection
from memlane.errors import AccessRefused

EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_ENOUGH_HANDSHAKES = 3
_REFUSED_SECONDS = 0.2


class Watch:
    """Follows the events of libzmq's monitor.

    Attributes:
        was_accepted: somebody has accepted a connection, whoever it was.
        lost_since: on `time.monotonic()`'s clock; None while there is a connection.
        refusal: why there never will be one.
    """

    def __init__(self, where: str, bound: float) -> None:
        self.was_accepted = False
        self.lost_since: float | None = time.monotonic()
        self.refusal: AccessRefused | None = None
        self._refused_since: float | None = None
        self._is_deserted = False
        self._where = where
        self._bound = bound
        self._descriptor = -1
        self._connection: Connection | None = None
        self._was_here = False
        self._failed = 0

    @property
    def is_connected(self) -> bool:
        return self._connection is not None

    @property
    def was_cut(self) -> bool:
        """There was a connection, and it ended."""
        return self._was_here and self.lost_since is not None

    def note(self, event: int, value: int) -> bool:
        """Whether there is a new connection, on which to say hello."""
        if event == zmq.EVENT_CONNECTED:
            self._descriptor, self.was_accepted = value, True
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            with suppress(OSError):  # gone again already: another event tells
                self._connection = Connection(self._descriptor)
            self.lost_since = self._refused_since = None
            self._was_here, self._is_deserted = True, False
            return True
        elif event == zmq.EVENT_DISCONNECTED:
            self._connection = None
            if self.lost_since is None:
                self.lost_since = time.monotonic()
        elif event != zmq.EVENT_CONNECT_RETRIED and not self._was_here:
            self._note_failed_handshake(event)
        return False

    def note_probe(self, is_refused: bool) -> None:
        """Does the writer's host refuse connections? Once may be a firewall's, or a proxy's that
        begins anew. All that had come is in the socket by then."""
        now = time.monotonic()
        if not is_refused or self.lost_since is None:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        else:
            self._is_deserted = now - self._refused_since >= _REFUSED_SECONDS

    def _note_failed_handshake(self, event: int) -> None:
        self._failed += 1
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            self.refusal = AccessRefused(
                f"the writer at {self._where} does not expect this reader's key"
            )
        elif self._failed >= _ENOUGH_HANDSHAKES:
            self.refusal = AccessRefused(
                f"who listens at {self._where} is not the writer of this handle, or has no CURVE"
            )

    def death(self) -> str | None:
        """Why the writer counts as dead; None if it does not."""
        if self._is_deserted:
            return "its host says that nobody listens there any more"
        if self._connection is not None and self._connection.is_silent(self._bound):
            return f"its host has not answered for {self._bound} s"
        if self.lost_since is not None and time.monotonic() - self.lost_since >= self._bound:
            return f"the connection ended, and could not be made again within {self._bound} s"
        return None
