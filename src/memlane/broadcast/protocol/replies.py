"""The control frames of a writer: how each is made, those that wait for connections without a
stream, and the connections that are to be shut."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from memlane.broadcast.protocol import admission
from memlane.broadcast.protocol.frames import Header, Refused, Welcome, What, control

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memlane._base.msgspec import msgspec
    from memlane.broadcast.options import RemoteOptions
    from memlane.broadcast.protocol.peer import Cursor, Peer
    from memlane.broadcast.protocol.places import Places


class Replies:
    """Makes and keeps a writer's answers.

    Args:
        epoch: of the writer, in every frame.
        ring_sizes: of relays' rings: bytes per chunk, and chunks.

    Attributes:
        unwanted: routes of connections to shut down, the oldest first.
    """

    def __init__(
        self,
        places: Places,
        options: RemoteOptions,
        epoch: int,
        pid: int,
        ring_sizes: tuple[int, int],
    ) -> None:
        self._places, self._options = places, options
        self._epoch, self._pid, self._ring_sizes = epoch, pid, ring_sizes
        self._waiting: deque[tuple[bytes, bytes]] = deque()
        self.unwanted: deque[bytes] = deque()

    # Frames -----------------------------------------------------------------------------------

    def frame(self, what: What, sequence: int = 0, body: msgspec.Struct | None = None) -> bytes:
        return control(Header(what, self._epoch, sequence), body)

    def refused(self, body: Refused) -> bytes:
        return self.frame(What.REFUSED, body=body)

    def seen(self, peer: Peer) -> bytes:
        """The answer to a reader behind a relay: whether that relay is still there."""
        return self.refused(admission.NO_RELAY) if peer.via is None else self.frame(What.SEEN)

    def welcome(self, peer: Peer, begin: Cursor = (0, 0)) -> bytes:
        """The WELCOME: where the stream begins, or which ring to make or read from."""
        sequence, piece = begin
        ring = self._places.ring_of(peer, self._ring_sizes) if peer.host else None
        options = self._options
        body = Welcome(self._pid, options.window, options.window_bytes, peer.greeting, ring)
        return control(Header(What.WELCOME, self._epoch, sequence, piece=piece), body)

    # Connections without a stream ---------------------------------------------------------------

    def answer(self, route: bytes, frame: bytes) -> None:
        """Queues a frame for a connection that has no stream."""
        self._waiting.append((route, frame))

    def due(self) -> Iterator[tuple[bytes, bytes]]:
        """Yields the queued frames, each until it was `sent`."""
        while self._waiting:
            yield self._waiting[0]

    def sent(self) -> None:
        """Notes that the first one was handed over, or that its connection is gone."""
        self._waiting.popleft()

    def reject(self, route: bytes) -> None:
        """Has the connection shut down."""
        if route not in self.unwanted:
            self.unwanted.append(route)
