"""What a reader sees of the connection to its writer. No sockets and no clock."""

from __future__ import annotations

from memlane.errors import AccessRefused, MemlaneError

_REFUSED_SECONDS = 0.2
_ENOUGH_HANDSHAKES = 3


class Watch:
    """The state of one reader's connection.

    Attributes:
        was_accepted: a connection was accepted, not necessarily by the writer.
        lost_since: None while there is a connection.
        failure: what every call raises once everything is taken.
    """

    def __init__(self, where: str, bound: float, now: float) -> None:
        self._where, self._bound = where, bound
        self.failure: MemlaneError | None = None
        self.was_accepted = False
        self.is_connected = self._was_here = self._is_deserted = self._is_silent = False
        self.lost_since: float | None = now
        self._refused_since: float | None = None
        self._failed = 0

    def accept(self) -> None:
        self.was_accepted = True

    def connect(self, _now: float) -> None:
        self.is_connected = self._was_here = True
        self.lost_since = self._refused_since = None
        self._is_deserted = self._is_silent = False

    def lose(self, now: float) -> None:
        self.is_connected = False
        if self.lost_since is None:
            self.lost_since = now

    @property
    def was_cut(self) -> bool:
        """There was a connection, and it ended."""
        return self._was_here and self.lost_since is not None

    def note_silence(self, is_silent: bool) -> None:
        """Notes whether the writer's host has been silent for longer than the bound."""
        self._is_silent = is_silent

    def note_probe(self, is_refused: bool, now: float) -> None:
        """Notes whether the writer's host refuses connections. One refusal proves nothing (a
        firewall, a restarting proxy); by a later one, all that had arrived has been received."""
        if not is_refused or self.lost_since is None:
            self._refused_since = None
        elif self._refused_since is None:
            self._refused_since = now
        else:
            self._is_deserted = now - self._refused_since >= _REFUSED_SECONDS

    def fail_handshake(self, *, is_key_unknown: bool) -> None:
        """Whatever accepted the connection does not behave like the writer."""
        if self._was_here:
            return
        self._failed += 1
        if is_key_unknown:
            self.failure = AccessRefused(
                f"the writer at {self._where} does not expect this reader's key"
            )
        elif self._failed >= _ENOUGH_HANDSHAKES:
            self.failure = AccessRefused(
                f"the handshake failed: the process listening at {self._where} is not this "
                f"handle's writer"
            )

    def death(self, now: float) -> str | None:
        """Why the writer counts as dead; None if it does not."""
        if self._is_deserted:
            return "its host refuses connections, because no process listens there any more"
        if self._is_silent:
            return f"its host has not answered for {self._bound} s"
        if self.was_cut and now - (self.lost_since or now) >= self._bound:
            return f"the connection was lost and could not be restored within {self._bound} s"
        return None

    def state(self) -> str:
        if not self.was_accepted:
            return "no connection accepted yet"
        if not self._was_here:
            return "its host accepted a connection, no answer yet"
        return "connected" if self.is_connected else "without a connection"
