"""A reader's view of the connection to its writer, and when that writer counts as dead.

A clock runs while nothing shows that the writer's host and port are still its own: connects are
refused or unanswered, or the process that accepts ends the handshake early. It stands while a
connection is open and the other kernel answers, complete handshake or not: a writer that is stopped
or busy accepts and does not answer, and is not dead.
"""

from __future__ import annotations

from memlane.broadcast.protocol.states import WRITER_LINK, LinkEvent, WriterLink
from memlane.errors import AccessRefused, MemlaneError

FIRST_CONTACT = 3.0
"""Seconds at least, however small the bound: a lost packet is sent again after one second."""
REFUSED_SECONDS = 0.8
"""Refusals of so many seconds are a death, named within a second; fewer a restarting proxy."""


class ConnectionState:
    """The state of one reader's connection.

    Args:
        where: the writer's address, for texts.
        bound: seconds after which an unreachable writer counts as dead, and after which a writer
            that is busy ends a handshake.

    Attributes:
        failure: what every call raises once everything is taken.
    """

    def __init__(self, where: str, bound: float, now: float) -> None:
        self._where, self._bound = where, bound
        self.link = WriterLink.UNTRIED
        self.failure: MemlaneError | None = None
        self._was_up = self._is_deserted = self._is_silent = False
        self._is_another = False  # another process there has ended every handshake for the bound
        self._accepted_at = self._earliest = self._ended_at = now
        self._doubted_since: float | None = None  # the clock, while it runs
        self._paused_since: float | None = None  # where it began, while a handshake is under way
        self._refused_since: float | None = None

    @property
    def is_connected(self) -> bool:
        return self.link is WriterLink.UP

    @property
    def was_cut(self) -> bool:
        """True if there was a connection, and now is none at all."""
        return self.link is WriterLink.CUT

    @property
    def is_doubted(self) -> bool:
        """True if the clock runs."""
        return self._doubted_since is not None or self.link is WriterLink.UNTRIED

    def _apply(self, event: LinkEvent) -> None:
        self.link = WRITER_LINK[event].get(self.link, self.link)

    def accept(self, now: float, earliest: float | None = None) -> None:
        """A TCP connection is open; its handshake began after `earliest`, if not now."""
        self._accepted_at, self._refused_since, self._is_deserted = now, None, False
        self._earliest = now if earliest is None else earliest
        if self._doubted_since is not None:
            self._paused_since, self._doubted_since = self._doubted_since, None
        self._apply(LinkEvent.ACCEPTED)

    def connect(self, _now: float) -> None:
        """The handshake is complete."""
        self._was_up = True
        self._doubted_since = self._paused_since = self._refused_since = None
        self._is_deserted = self._is_silent = self._is_another = False
        self._apply(LinkEvent.UP)

    def lose(self, now: float) -> None:
        """The connection is gone, or its handshake has failed."""
        is_early = now - self._earliest < self._bound / 2
        if self.link is WriterLink.UP or (self.link is WriterLink.ACCEPTED and not is_early):
            self._doubted_since = now
        elif self.link is WriterLink.ACCEPTED:  # by the other side, not by this end's limit
            since = self._accepted_at if self._paused_since is None else self._paused_since
            self._doubted_since, self._ended_at = since, now
            self._is_another = self._was_up and now - since >= self._bound
            self.check_handshakes(now)
        self._paused_since, self._is_silent = None, False
        self._apply(LinkEvent.LOST)

    def refuse(self) -> None:
        """Authentication has said no."""
        if not self._was_up:
            self.failure = AccessRefused(
                f"the writer at {self._where} does not expect this reader's key"
            )

    def fail(self, failure: MemlaneError) -> None:
        """Keeps the first failure."""
        self.failure = self.failure or failure

    def delay_clock(self, seconds: float, now: float) -> None:
        """Leaves out so many seconds in which this process could not connect."""
        self._refused_since = None
        self._ended_at = min(now, self._ended_at + seconds)
        if self._doubted_since is not None:
            self._doubted_since = min(now, self._doubted_since + seconds)

    def note_silence(self, is_silent: bool) -> None:
        """Notes whether the writer's host has been silent for longer than the bound."""
        self._is_silent = is_silent

    def note_probe(self, is_refused: bool, now: float) -> None:
        """Notes whether the writer's host refuses connections. One refusal proves nothing (a
        firewall, a restarting proxy); by a later one, all that had arrived has been received."""
        if not is_refused or self.link is not WriterLink.CUT:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        else:
            self._is_deserted = now - self._refused_since >= REFUSED_SECONDS

    def probe_due(self) -> float | None:
        """Returns when a refusal will have lasted long enough; None if that is not asked."""
        if self._refused_since is None or self._is_deserted:
            return None
        return self._refused_since + REFUSED_SECONDS

    def check_handshakes(self, now: float) -> None:
        """Fails if, before the first complete handshake, all have been ended early for too long."""
        since = self._doubted_since
        if not self._was_up and since is not None and now - since >= self._bound:
            failure = AccessRefused(
                f"every handshake was ended for {now - since:.1f} s: either the process listening "
                f"at {self._where} is not this handle's writer, or a proxy or firewall on the way "
                f"ends its connections"
            )
            self.fail(failure)

    def death(self, now: float) -> str | None:
        """Returns why the writer counts as dead; None if it does not."""
        if self.link is WriterLink.UNTRIED:
            is_late = now - self._ended_at >= max(self._bound, FIRST_CONTACT)
            return "no connection was accepted" if is_late else None
        if self._is_deserted:
            return "its host refuses connections, because no process listens there any more"
        if self._is_another:
            return f"the process that listens there has ended every handshake for {self._bound} s"
        if self._is_silent:
            return f"its host has not answered for {self._bound} s"
        since = now if self._doubted_since is None else self._doubted_since
        if not self._was_up:  # while handshakes are ended early, see `check_handshakes`
            since = max(since, self._ended_at)
        if now - since >= self._bound:
            return f"the connection was lost and could not be restored within {self._bound} s"
        return None

    def state(self, now: float) -> str:
        """Returns the state as texts name it."""
        match self.link:
            case WriterLink.UP:
                return "connected"
            case WriterLink.ACCEPTED:
                waits = f"accepted, unanswered for {now - self._accepted_at:.1f} s"
                return f"{waits}: busy, stopped, or another process on that port"
            case WriterLink.CUT if self._was_up:
                return "without a connection"
            case WriterLink.CUT:
                return "the handshake was ended"
            case _:
                return "no connection accepted yet"
