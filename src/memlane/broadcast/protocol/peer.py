"""One remote reader as its writer sees it. Only its own methods assign its fields.

No sockets and no clock: times are arguments, always from the same clock of the caller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import count, islice
from typing import TYPE_CHECKING

from memlane.broadcast.statistics import ReaderState, ReaderStatistics

if TYPE_CHECKING:
    from memlane.broadcast.protocol.frames import Hello

Cursor = tuple[int, int]
"""Sequence and piece of a frame."""


@dataclass(slots=True, eq=False)
class Peer:
    """A place, and the reader that took it.

    Absent, then running, then dead or closed for good. While running, it may lose its connection
    and reconnect; while connected, it gets a stream of messages or reads behind a relay.
    """

    place: int
    rank: int | None = None  # None: nobody has asked for this place yet
    state: ReaderState = "absent"
    session: bytes = b""
    pid: int = 0
    address: str = "an unknown address"
    route: bytes | None = None  # of its latest connection
    is_connected: bool = False
    lost_since: float | None = None  # since when it lacks a connection that it needs
    knocked_at: float = 0.0  # when it last proved its key, before its HELLO
    taken: int = 0  # messages before this sequence were taken
    taken_bytes: int = 0
    last_progress: float = 0.0
    died: str = ""  # why it counts as dead
    is_silent: bool = False  # dead because its host does not answer; it may be alive
    is_alone: bool = False  # nobody else is expected on its host
    host: str = ""  # readers with the same text may share memory; empty: shares none
    ring: tuple[str, str] | None = None  # name and id of the ring that it relays through
    via: Peer | None = None  # the relay that passes messages on to it
    has_left: bool = False  # it has closed, but still relays to others
    has_heard_end: bool = False
    is_streaming: bool = False  # messages are sent to it
    cursor: Cursor = (0, 0)  # the next frame of a message to send
    said: deque[bytes] = field(default_factory=deque)  # control frames, to send first
    greeting: int = 0  # the number of its latest HELLO
    end_due: float = 0.0  # when END is sent again
    was_refused: bool = False  # although it is attached: it claimed what cannot be

    @property
    def is_waited_for(self) -> bool:
        """Does the writer keep messages for it?"""
        return self.state in ("absent", "running") and not self.has_left

    @property
    def owes_end(self) -> bool:
        """Must it still confirm END? A relay does so for the readers behind it."""
        return self.state == "running" and self.via is None and not self.has_heard_end

    # Events -----------------------------------------------------------------------------------

    def keep_for(self, rank: int | None, *, is_alone: bool = False) -> None:
        """Keeps the place for that rank from now on; None: for no rank."""
        self.rank, self.is_alone = rank, is_alone or self.is_alone

    def ask(self, hello: Hello, host: str, via: Peer | None) -> None:
        """It wants to attach, and may share memory at `host`."""
        self.rank, self.session, self.host, self.via = hello.rank, hello.session, host, via

    def attach(self, now: float) -> None:
        self.state, self.last_progress = "running", now

    def connect(self, route: bytes, pid: int, address: str, greeting: int) -> None:
        """On a new connection, or again on the same one."""
        self.greeting = greeting
        self.said.clear()
        self.is_streaming = False
        self.route, self.pid, self.address = route, pid, address
        self.is_connected, self.lost_since = True, None

    def refuse(self) -> bool:
        """Its claim cannot be true. Returns whether that is the first time."""
        is_first, self.was_refused = not self.was_refused, True
        return is_first

    def stream_from(self, cursor: Cursor, welcome: bytes) -> None:
        """It gets a WELCOME, then messages from that frame on."""
        # In this order: a reader with a WELCOME but no stream would wait forever.
        self.cursor, self.is_streaming, self.end_due = cursor, True, 0.0
        self.said.append(welcome)

    def say(self, frame: bytes) -> None:
        """Queues a frame that may be lost with the connection, and is then sent again."""
        if self.is_connected:
            self.said.append(frame)

    def note_sent(self, cursor: Cursor | None) -> None:
        """Its next frame was handed over. After a piece of a message, `cursor` comes next."""
        if cursor is None:
            self.said.popleft()
        else:
            self.cursor = cursor

    def lose(self, now: float) -> None:
        """Its connection is gone. Frames that it sent before may still arrive."""
        self.is_connected = self.is_streaming = False
        self.said.clear()
        self.note_loss(now)

    def note_loss(self, now: float) -> None:
        """If it has no connection, and no relay that reports on it, it is lost from now on. Called
        by `tick`, too, because an interruption may have skipped this."""
        is_lost = self.state == "running" and self.via is None and not self.is_connected
        if is_lost and self.lost_since is None:
            self.lost_since = now

    def knock(self, now: float) -> None:
        """It has proven its key again; the HELLO follows once its interpreter runs."""
        self.knocked_at = now

    def take(self, sequence: int, nbytes: int, now: float) -> None:
        """It has taken all messages before `sequence`, `nbytes` bytes in total."""
        self.taken_bytes, self.taken, self.last_progress = nbytes, sequence, now

    def note_progress(self, now: float) -> None:
        """Its host has received bytes, even if no complete message."""
        self.last_progress = now

    def relay_through(self, ring: tuple[str, str]) -> None:
        self.ring = ring

    def found_behind(self, pid: int, address: str) -> None:
        """It reads from the ring of its relay."""
        self.pid, self.address = pid, address

    def share_nothing(self) -> None:
        self.host, self.via, self.ring = "", None, None

    def part(self, now: float) -> None:
        """Its relay has ended. It continues alone once it notices."""
        self.share_nothing()
        self.note_loss(now)

    def forget(self) -> None:
        """Nobody has attached after all."""
        self.share_nothing()
        self.session = b""

    def hear_end(self) -> None:
        self.has_heard_end = True

    def tell_end(self, frame: bytes, due: float) -> None:
        """Queues END; it is sent again when `due`."""
        self.said.append(frame)
        self.end_due = due

    def stop_reading(self) -> None:
        """It has closed as a reader, but goes on as a relay."""
        self.has_left = True

    def leave(self) -> None:
        """It has closed, or its place was given up."""
        self.state, self.lost_since = "closed", None
        self.is_streaming = self.is_silent = False

    def fall_silent(self) -> None:
        self.is_silent = True

    def die(self, why: str, word: bytes) -> None:
        """Its process is gone, or counts as gone; `word` tells it so. If it had closed as a reader,
        only the readers behind it lost something."""
        self.state, self.died, self.lost_since = "closed" if self.has_left else "dead", why, None
        self.is_streaming = False
        self.say(word)  # in case it is alive, and the same connection reaches it again

    # Descriptions -----------------------------------------------------------------------------

    def usual_rank(self, local_ranks: list[int]) -> int:
        """Its rank. If none was chosen, the default of its place: places get the ranks that are
        not local, in order."""
        if self.rank is not None:
            return self.rank
        usual = (rank for rank in count() if rank not in local_ranks)
        return next(islice(usual, self.place, None))

    def name(self, local_ranks: list[int]) -> str:
        return f"reader {self.usual_rank(local_ranks)}"

    def text(self, ranks: list[int], sent: int, now: float) -> str:
        """Rank, pid and address, how far behind, and since when."""
        if self.state == "absent":
            return f"{self.name(ranks)} (never attached)"
        facts = [f"pid {self.pid} at {self.address}"]
        if self.lost_since is not None:
            facts.append(f"without a connection for {now - self.lost_since:.1f} s")
        else:  # only its own host knows whether it is stopped
            facts.append("connected" if self.state == "running" else self.state)
        if self.via is not None:
            facts.append(f"behind {self.via.name(ranks)}'s relay")
        facts.append(f"{sent - self.taken} behind")
        facts.append(f"last progress {now - self.last_progress:.1f} s ago")
        return f"{self.name(ranks)} ({', '.join(facts)})"

    def statistics(self, ranks: list[int], sent: int) -> ReaderStatistics:
        was_here = self.state != "absent" and self.pid != 0
        is_lost = self.state == "running" and self.lost_since is not None
        return ReaderStatistics(
            rank=self.usual_rank(ranks),
            pid=self.pid if was_here else None,
            state="closed" if self.has_left else "unknown" if is_lost else self.state,
            behind=sent - self.taken if self.is_waited_for else 0,
            last_progress=self.last_progress if was_here else None,
            is_waiting=False,
            views=0,
            views_since=None,
            address=self.address if was_here else None,
        )


def usual_place(rank: int, local_ranks: list[int]) -> int:
    """The default place of a rank; beyond the last place for a rank that is higher than usual."""
    return rank - sum(1 for local in set(local_ranks) if local < rank)
