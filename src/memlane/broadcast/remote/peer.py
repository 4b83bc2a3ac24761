"""One remote reader as its writer sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memlane.broadcast.statistics import ReaderState, ReaderStatistics

if TYPE_CHECKING:
    from memlane.broadcast.remote.tcp import Connection

_ANSWER_SECONDS = 0.2


@dataclass(slots=True)
class Peer:
    """A place, and who took it. Times are of `time.monotonic()`."""

    place: int
    rank: int | None = None  # None: nobody has asked for this place yet
    state: ReaderState = "absent"
    session: bytes = b""
    pid: int = 0
    address: str = "an unknown address"
    route: bytes | None = None  # ROUTER's name for its latest connection
    connection: Connection | None = None  # None: nothing can be sent
    lost_since: float | None = None  # since when there is no connection
    knocked_at: float = 0.0  # when somebody proved its key again, who has not said hello yet
    taken: int = 0  # messages before this sequence were taken
    taken_bytes: int = 0
    last_progress: float = 0.0
    died: str = field(default="")  # why it counts as dead
    is_alone: bool = False  # nobody else is expected on its host
    host: str = ""  # where it may share memory with others; empty: it shares none
    ring: tuple[str, str] | None = None  # name and id of the ring that it relays through
    via: Peer | None = None  # the relay that passes messages on to it
    has_left: bool = False  # it has closed, but relays to others still
    end_said_at: float = 0.0  # when it was last told that there are no more messages, and
    has_heard_end: bool = False  # it has said that it knows

    @property
    def is_waited_for(self) -> bool:
        """Does the writer keep messages for it?"""
        return self.state in ("absent", "running") and not self.has_left

    @property
    def is_lost(self) -> bool:
        """Is it without a connection, and may come back?"""
        return self.state == "running" and self.lost_since is not None

    def may_ask_again(self) -> bool:
        """For what the writer said last, the end. A signal handler may raise in a reader between
        taking a frame and looking at it; then it says hello, and is told again. A reader in a call
        answers at once, but one that computes says nothing, so this does not last."""
        is_asked = self.connection is not None and not self.has_heard_end
        return is_asked and time.monotonic() - self.end_said_at < _ANSWER_SECONDS

    def name(self, ranks: list[int]) -> str:
        """`reader 3`, or what is known of it; `ranks` would be the usual one's."""
        rank = self.rank if self.rank is not None else usual_rank(self.place, ranks)
        return f"reader {rank}"

    def text(self, ranks: list[int], sent: int) -> str:
        """Who it is, where, how far behind, since when."""
        if self.state == "absent":
            return f"{self.name(ranks)} (never attached)"
        facts = [f"pid {self.pid} at {self.address}", self.state]
        if self.via is not None:
            facts.append(f"behind {self.via.name(ranks)}'s relay")
        if self.lost_since is not None:
            facts.append(f"without a connection for {time.monotonic() - self.lost_since:.1f} s")
        facts.append(f"{sent - self.taken} behind")
        facts.append(f"last progress {time.monotonic() - self.last_progress:.1f} s ago")
        return f"{self.name(ranks)} ({', '.join(facts)})"

    def statistics(self, ranks: list[int], sent: int) -> ReaderStatistics:
        was_here = self.state != "absent" and self.pid != 0
        return ReaderStatistics(
            rank=self.rank if self.rank is not None else usual_rank(self.place, ranks),
            pid=self.pid if was_here else None,
            state="closed" if self.has_left else "unknown" if self.is_lost else self.state,
            behind=sent - self.taken if self.is_waited_for else 0,
            last_progress=self.last_progress if was_here else None,
            is_waiting=False,
            views=0,
            views_since=None,
            address=self.address if was_here else None,
        )


def usual_rank(place: int, local_ranks: list[int]) -> int:
    """Of a place, if nobody chooses others: the ranks that are not local, in turn."""
    taken, rank = set(local_ranks), -1
    for _ in range(place + 1):
        rank += 1
        while rank in taken:
            rank += 1
    return rank


def usual_place(rank: int, local_ranks: list[int]) -> int:
    """The reverse; beyond the last place for a rank that is higher than usual."""
    return rank - sum(1 for local in set(local_ranks) if local < rank)
