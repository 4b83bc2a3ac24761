"""One remote reader as its writer sees it. Only its own methods assign its fields; its states
change by `apply`, as the tables of `states` say.

Times are arguments, always from the same clock of the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memlane.broadcast.protocol.states import Event, Life, Link, after
from memlane.broadcast.statistics import ReaderState

if TYPE_CHECKING:
    from memlane.broadcast.protocol.frames import Hello

Cursor = tuple[int, int]
"""Sequence and piece of a frame."""

MAX_IDLE_FRAMES = 1000
"""Frames without progress that one connection may send, as long as nothing shows that its answers
were read. Readers repeat a question once a second at most."""

_STATES: dict[Life, ReaderState] = {
    Life.FREE: "absent",
    Life.ATTACHING: "absent",
    Life.RUNNING: "running",
    Life.RELAYING: "closed",
    Life.DEAD: "dead",
    Life.CLOSED: "closed",
}


_HAVE_READ = frozenset((Life.RELAYING, Life.CLOSED))


@dataclass(slots=True, eq=False)
class Peer:
    """A place, and the reader that took it.

    Attributes:
        place: its index.
        usual_rank: the rank that the place has unless a reader asks for it with another one.
        comes_late: nobody waits for it before it has attached.
        generation: how many readers have had the place before; each has a key of its own.
        first: the message that its stream begins with.
    """

    place: int
    usual_rank: int
    comes_late: bool = False
    generation: int = 0
    first: int = 0
    rank: int | None = None  # None: nobody has asked for this place yet
    life: Life = Life.FREE
    link: Link = Link.NONE
    lost_since: float | None = None  # while its link is LOST
    session: bytes = b""
    pid: int = 0
    address: str = "an unknown address"
    route: bytes | None = None  # of its latest connection
    authenticated_at: float = 0.0  # when it last proved its key, before its HELLO
    taken: int = 0  # messages before this sequence were taken
    taken_bytes: int = 0
    last_progress: float = 0.0
    ended_at: float = 0.0  # when it last stopped reading; 0: it never has
    died: str = ""  # why it counts as dead
    is_silent: bool = False  # dead because its host does not answer; it may be alive
    is_unshared: bool = False  # nobody else is expected on its host
    host: str = ""  # readers with the same text may share memory; empty: shares none
    ring: tuple[str, str] | None = None  # name and id of the ring that it relays through
    reported_at: float = 0.0  # when it last reported as a relay, or was asked to
    is_late: bool = False  # it relays too slowly for others to rely on it
    via: Peer | None = None  # the relay that passes messages on to it
    has_heard_end: bool = False
    cursor: Cursor = (0, 0)  # the next frame of a message to send
    said: deque[bytes] = field(default_factory=deque)  # control frames, to send first
    asks: bool = False  # its question who is absent has yet to be answered
    greeting: int = 0  # the number of its latest HELLO
    end_due: float = 0.0  # when END is sent again
    was_refused: bool = False  # although it is attached: it claimed what cannot be
    other_version: str = ""  # while it is missing: why the process that has its key cannot attach
    idle_frames: int = 0  # since it last made progress, or its answers were read
    resent_bytes: int = 0  # on this connection, because it asked for them again
    moved_bytes: int = 0  # that its host has received since it last took a message

    @property
    def is_absent(self) -> bool:
        return self.life in (Life.FREE, Life.ATTACHING)

    @property
    def is_here(self) -> bool:
        """True if it has attached, and not ended."""
        return self.life in (Life.RUNNING, Life.RELAYING)

    @property
    def is_connected(self) -> bool:
        return self.link in (Link.IDLE, Link.STREAMING)

    @property
    def is_waited_for(self) -> bool:
        """True if the writer keeps messages for it."""
        return self.life is Life.RUNNING or (self.is_absent and not self.comes_late)

    @property
    def is_missing(self) -> bool:
        """True if it is expected, and has not attached."""
        return self.is_absent and not self.comes_late

    @property
    def was_released(self) -> bool:
        """True if it was released before it attached."""
        return self.life is Life.CLOSED and not self.session

    @property
    def owes_end(self) -> bool:
        """True if it must still confirm END. A relay does so for the readers behind it."""
        return self.is_here and self.via is None and not self.has_heard_end

    @property
    def is_relay(self) -> bool:
        """True if it passes messages on to others."""
        return bool(self.host) and self.via is None and self.is_here and not self.is_late

    # Events -----------------------------------------------------------------------------------

    def apply(self, event: Event, now: float) -> None:
        """Both states and the clock change, or none: a signal handler can raise only after a
        call."""
        life, link = after(event, self.life, self.link)
        since = self.lost_since if self.lost_since is not None else now
        has_ended = life is not self.life and life in _HAVE_READ and not self.is_absent
        ended = now if has_ended else self.ended_at
        lost_since = since if link is Link.LOST else None
        self.life, self.link, self.lost_since, self.ended_at = life, link, lost_since, ended

    def keep_for(self, rank: int | None, *, is_unshared: bool = False) -> None:
        """Keeps the place for that rank from now on; None: for no rank."""
        self.rank, self.is_unshared = rank, is_unshared or self.is_unshared

    def successor(self, rank: int, sequence: int, nbytes: int, now: float) -> Peer:
        """The next reader of this place, `rank`: alone on its host, and with another key. `nbytes`
        bytes come before its first message, `sequence`."""
        # Where nobody waits for it, its first message is known when it attaches.
        new = Peer(self.place, self.usual_rank, self.comes_late, self.generation + 1)
        new.life = self.life
        new.keep_for(rank, is_unshared=True)
        new.begin_at(sequence, nbytes)
        new.apply(Event.READMITTED, now)
        return new

    def begin_at(self, sequence: int, nbytes: int) -> None:
        """Makes `sequence` its first message; `nbytes` bytes come before it."""
        self.first = self.taken = sequence
        self.taken_bytes = nbytes

    def wants(self, hello: Hello) -> tuple[int, Cursor]:
        """Returns what it has taken, and the frame that it wants. It does not know its first
        message before it gets one."""
        if (hello.taken, hello.sequence, hello.piece) == (0, 0, 0):
            return self.first, (self.first, 0)
        return hello.taken, (hello.sequence, hello.piece)

    def has_heard(self, hello: Hello) -> bool:
        """Returns whether it has greeted since, so that this HELLO's connection has ended."""
        return self.session == hello.session and hello.number <= self.greeting

    def is_behind(self, hello: Hello) -> bool:
        """Returns whether it reads from a relay's ring, or did when it sent that HELLO."""
        return hello.is_behind or self.via is not None

    def ask(self, hello: Hello, host: str, via: Peer | None) -> None:
        """It wants to attach, and may share memory at `host`."""
        self.rank, self.session, self.host, self.via = hello.rank, hello.session, host, via

    def attach(self, event: Event, now: float) -> None:
        self.last_progress = self.reported_at = now
        self.other_version = ""
        self.apply(event, now)

    def connect(self, route: bytes, pid: int, address: str, greeting: int, now: float) -> None:
        """On a new connection, or again on the same one."""
        if route != self.route:
            self.idle_frames = self.resent_bytes = 0
            self.reported_at = now  # as a relay, it may have had no connection to report on
        self.greeting, self.asks = greeting, False
        self.said.clear()
        self.route, self.pid, self.address = route, pid, address
        self.apply(Event.CONNECTED, now)

    def begin_stream(self, cursor: Cursor, welcome: bytes, now: float) -> None:
        """It gets a WELCOME, then messages from that frame on."""
        # In this order: a reader with a WELCOME but no stream would wait forever.
        self.cursor, self.end_due = cursor, 0.0
        self.apply(Event.STREAM_BEGAN, now)
        self.said.append(welcome)

    def resend(self, nbytes: int) -> None:
        """It asks for so many bytes again that this connection has carried."""
        self.resent_bytes += nbytes

    def say(self, frame: bytes) -> None:
        """Queues a frame that may be lost with the connection, and is then sent again."""
        if self.is_connected:
            self.said.append(frame)

    def sent(self, cursor: Cursor | None) -> None:
        """Notes that its next frame was handed over. After a piece of a message, `cursor` comes
        next."""
        if cursor is None:
            self.said.popleft()
        else:
            self.cursor = cursor

    def lose(self, now: float) -> None:
        """Notes the loss of its connection. Frames that it sent before may still arrive."""
        if self.life is Life.RUNNING and self.via is not None:
            event = Event.DISCONNECTED_BEHIND
        elif self.is_here or self.life is Life.ATTACHING:
            event = Event.DISCONNECTED
        else:
            event = Event.DISCONNECTED_AFTER
        self.apply(event, now)
        self.said.clear()

    def authenticate(self, now: float) -> None:
        """It has proven its key again; the HELLO follows once its interpreter runs."""
        self.authenticated_at = now

    def delay_clock(self, seconds: float, now: float) -> None:
        """Leaves out so many seconds in which it could not come back, for the writer's reasons."""
        if self.lost_since is not None:
            self.lost_since = min(now, self.lost_since + seconds)

    def take(self, sequence: int, nbytes: int, now: float) -> None:
        """It has taken all messages before `sequence`, `nbytes` bytes in total."""
        self.taken_bytes, self.taken, self.last_progress = nbytes, sequence, now
        self.idle_frames = self.resent_bytes = self.moved_bytes = 0

    def note_progress(self, now: float) -> None:
        """Notes that its host has received bytes, even if no complete message."""
        self.last_progress = now

    def note_moved(self, nbytes: int) -> int:
        """Notes the bytes that its host has received; returns how many since it took a message."""
        self.moved_bytes += nbytes
        return self.moved_bytes

    def note_idle_frame(self) -> bool:
        """It has sent a frame that was no progress. Returns whether those are too many."""
        self.idle_frames += 1
        return self.idle_frames > MAX_IDLE_FRAMES

    def note_drained(self) -> None:
        """Notes that its host has received all that was sent, answers included."""
        self.idle_frames = 0

    def refuse(self) -> bool:
        """Notes a claim that cannot be true; returns whether that is the first time."""
        is_first, self.was_refused = not self.was_refused, True
        return is_first

    def refuse_version(self, why: str) -> None:
        """The process that has its key speaks another version."""
        self.other_version = why

    def question(self) -> None:
        self.asks = True

    def answer(self, frame: bytes) -> None:
        self.asks = False
        self.say(frame)

    def relay_through(self, ring: tuple[str, str]) -> None:
        self.ring = ring

    def report(self, now: float) -> None:
        self.reported_at = now

    def found_behind(self, pid: int, address: str) -> None:
        """It reads from the ring of its relay."""
        self.pid, self.address = pid, address

    def stop_relaying(self) -> None:
        """It does not report: it goes on for its own reader, but for nobody else."""
        self.is_late = True

    def stop_sharing(self) -> None:
        self.host, self.via, self.ring, self.is_late = "", None, None, False

    def part(self, now: float) -> None:
        """Notes the end of its relay. It goes on alone once it notices; if it had not attached, its
        place is free."""
        self.apply(Event.RELAY_ENDED, now)
        if self.life is Life.FREE:
            self.forget()
        else:
            self.stop_sharing()

    def forget(self) -> None:
        """Notes that nobody has attached after all."""
        self.session = b""
        self.stop_sharing()

    def hear_end(self) -> None:
        self.has_heard_end = True

    def tell_end(self, frame: bytes, due: float) -> None:
        """Queues END; it is sent again when `due`."""
        self.said.append(frame)
        self.end_due = due

    def fall_silent(self) -> None:
        self.is_silent = self.life is Life.RUNNING  # one that has closed as a reader misses nothing

    def release(self, rank: int, now: float) -> None:
        """The application goes on without it."""
        self.keep_for(rank)
        self.is_silent, self.other_version = False, ""
        self.apply(Event.RELEASED, now)

    def die(self, event: Event, why: str, word: bytes, now: float) -> None:
        """Notes that its process is gone, or counts as gone; `word` tells it so. If it had closed
        as a reader, only the readers behind it lost something."""
        self.died = why
        self.apply(event, now)
        self.say(word)  # in case it is alive, and the same connection reaches it again

    # Descriptions -----------------------------------------------------------------------------

    @property
    def rank_or_usual(self) -> int:
        return self.usual_rank if self.rank is None else self.rank

    @property
    def name(self) -> str:
        return f"reader {self.rank_or_usual}"

    @property
    def state(self) -> ReaderState:
        return _STATES[self.life]
