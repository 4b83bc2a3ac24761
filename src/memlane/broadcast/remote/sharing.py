"""A reader on another host that may share its stream of messages with others there.

`hosts.py` has the writer's side, and tells how they find each other.
"""

from __future__ import annotations

import os
from contextlib import suppress

import zmq

from memlane.broadcast.remote.reader import RemoteReader
from memlane.broadcast.remote.wire import Header, Report, ReportRow, Ring, What, control

_ROWS = 64  # of a report that fits a frame of a reader


class SharingReader(RemoteReader):
    """As its writer wants it: for itself alone, as its host's relay, or about to read from one."""

    @property
    def is_ready(self) -> bool:
        """Has the writer said that everybody has attached?"""
        return self._is_ready

    @property
    def is_over(self) -> bool:
        """Will nobody attach any more?"""
        return self._is_ended or self._failure is not None or self._watch.death() is not None

    def wake(self) -> None:
        """Has a `take` that another thread is blocked in look at its `cancel`."""
        with self._lock:
            if not self._closed:
                self._has_news = True
                os.eventfd_write(self._news, 1)

    def hear(self) -> None:
        """What the writer has said; messages stay where they are."""
        with self.turn, self._lock:
            self._receive()

    def ask_who_is_absent(self) -> None:
        """`on_absent` hears the answer."""
        with self._lock:
            self._say(What.ASK)

    def report(self, name: str, ring_id: str, rows: list[ReportRow]) -> None:
        """Of the readers of that ring. Without a connection it is lost, so it is told again."""
        with self._lock, suppress(zmq.Again):
            for first in range(0, max(len(rows), 1), _ROWS):
                body = Report(name, ring_id, rows[first : first + _ROWS])
                self.socket.send(
                    control(Header(What.REPORT, self._stream.epoch), body), zmq.DONTWAIT
                )

    # For who reads from a relay's ring ---------------------------------------------------------

    def is_seen_at(self, ring: Ring) -> bool:
        """Reports itself in that ring, and returns when the writer knows; False: the ring has no
        relay any more."""
        here = [ReportRow(ring.place, os.getpid(), "running", 0)]
        with self.turn:
            self._until(
                lambda: self._is_seen or self.ring is None,
                lambda: self.report(ring.name, ring.ring_id, here),
            )
        return self._is_seen

    def read_alone(self) -> None:
        """Has the writer send to this reader whatever it sends to others on this host."""
        with self.turn:
            with self._lock:
                self._stream.is_welcome = False
                self._share_nothing()
            self._until(lambda: self._stream.is_welcome)
