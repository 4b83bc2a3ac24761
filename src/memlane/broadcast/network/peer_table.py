"""The table in which an end shows observers its queue's participants, as it knows them.

A remote end has no ring that `memlane stuck` could read, and a ring says nothing of other hosts.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from memlane import _native
from memlane._base import processes
from memlane._base.diagnosis import warn
from memlane._base.segments import name_of, new_id
from memlane._base.slots import ATTACHED, NO_SLOT, PeerFacts, own_pid_namespace, packed
from memlane.broadcast.protocol.descriptions import facts_of
from memlane.errors import MemlaneError

if TYPE_CHECKING:
    from memlane._base.blame import Activity, Facts
    from memlane._base.slots import Slot
    from memlane.broadcast.network.sending import Sending
    from memlane.broadcast.protocol.writer_session import WriterSession

_PAUSE = 0.1  # seconds between two updates, and before a wait is shown
_SHARE = 50  # updates take at most this part of the time
_CODES = {"elsewhere": 0, "waiting": 1, "attaching": 2}
_STATES = {"absent": 0, "closed": 2}
_CONDITIONS = {"lost": 1, "dead": 2}
_HERE = PeerFacts(0, 0, 0, b"", b"", b"").pack()


class PeerTable:
    """Shows what an end knows and waits for; with the end's lock held.

    What prevents that is logged once, and the end works without a table.
    """

    def __init__(
        self,
        geometry: _native.RingGeometry,
        queue_id: bytes,
        label: str = "",
        *,
        is_writer: bool,
        has_late_readers: bool = False,
    ) -> None:
        self._geometry, self._queue_id = geometry, queue_id
        self._is_writer, self._has_late_readers = is_writer, has_late_readers
        self._label = label
        self._native: _native.PeerTable | None = None
        self._has_failed = False
        self._rows: dict[int, object] = {}  # what was shown last
        self._due = 0.0
        self._activity: Activity = "elsewhere"
        self._since = 0.0
        self._shows_wait = False
        self._position, self._moved_at = -1, 0.0
        ticks = processes.status(os.getpid())[1]
        self._own = NO_SLOT._replace(
            state=ATTACHED,
            pid=os.getpid(),
            start_ticks=ticks or 0,
            pid_namespace=own_pid_namespace(),
        )

    @property
    def label(self) -> str:
        """The queue's name."""
        return self._label

    @label.setter
    def label(self, label: str) -> None:
        self._label = label
        if self._native is not None:
            self._native.label = label

    # What this end does -----------------------------------------------------------------------

    def begin(self, activity: Activity) -> None:
        """A call waits from now on."""
        self._since = time.monotonic()
        self._activity = activity

    def end(self) -> bool:
        """The wait is over. Returns whether it was shown, so that an update is due at once."""
        self._activity = "elsewhere"
        if self._shows_wait:
            self._due = 0.0
        return self._shows_wait

    def is_due(self, now: float) -> bool:
        """Returns whether it is time for an update."""
        return now >= self._due and not self._has_failed

    # Updates ----------------------------------------------------------------------------------

    def show_own(
        self, row: int, position: int, nbytes: int, waits: int, now: float, *, rank: int | None
    ) -> None:
        """Shows this end: its messages and their bytes, its calls that waited, what it does."""
        if position != self._position:
            self._position, self._moved_at = position, now
        is_long = self._activity != "elsewhere" and now - self._since >= _PAUSE
        self._shows_wait = is_long
        slot = self._own._replace(
            rank_plus_1=_shown_rank(rank),
            position=position,
            last_progress=_ns(self._moved_at),
            activity_code=_CODES[self._activity] if is_long else 0,
            activity_since=_ns(self._since) if is_long else 0,
            bytes=nbytes,
            waits=waits,
        )
        self._write(row, slot, _HERE)

    def show_absent(self, count: int) -> None:
        """Notes how many readers on other hosts have not attached."""
        self._own = self._own._replace(absent_elsewhere=count)

    def show_peer(
        self,
        row: int,
        facts: Facts,
        rank: int | None,
        position: int,
        first: int,
        now: float,
        *,
        is_in_the_way: bool = False,
    ) -> None:
        """Shows a participant on another host, which has the messages from `first` on."""
        progress = 0 if facts.silent_for is None else _ns(now - facts.silent_for)
        slot = NO_SLOT._replace(
            state=_STATES.get(facts.state, ATTACHED),
            rank_plus_1=_shown_rank(rank),
            pid=max(0, facts.pid or 0) % (1 << 63),  # as a peer says
            first_plus_1=1 + first,
            position=position,
            last_progress=progress,
        )
        self._write(
            row,
            slot,
            PeerFacts(
                1,
                is_in_the_way,
                _CONDITIONS.get(facts.state, 0),
                facts.address.encode(),
                facts.doing.encode(),
                ", ".join(facts.more).encode(),
            ).pack(),
        )

    def is_shown(self, row: int, what: object) -> bool:
        """Returns whether the row shows that already; it does after this call and the next update
        of it."""
        if self._rows.get(row) == what:
            return True
        self._rows[row] = what
        return False

    def rest(self, began: float) -> None:
        """Ends an update that began then; the next is due after a pause."""
        now = time.monotonic()
        self._due = now + max(_PAUSE, _SHARE * (now - began))

    def _write(self, row: int, slot: Slot, facts: bytes) -> None:
        if self._native is None and not self._has_failed:
            try:
                name = name_of(new_id())
                self._native = _native.PeerTable(
                    self._geometry, self._queue_id, name, self._is_writer, self._has_late_readers
                )
                self._native.label = self._label
            except MemlaneError as error:
                self._has_failed = True
                warn("memlane stuck will not show the remote side of a queue: %s", error)
        if self._native is not None:
            self._native.write(row, packed(slot), facts)

    def close(self) -> None:
        """Takes the table away; another update would make it anew."""
        self._rows.clear()
        if self._native is not None:
            self._native.close()
            self._native = None


class ShownReaders:
    """The rows of a writer's remote readers, and which of them have no room for the message that
    was last waited for."""

    def __init__(self, table: PeerTable, session: WriterSession, sending: Sending) -> None:
        self._table, self._session, self._sending = table, session, sending
        self._refused = 0  # bytes of the message that is waited for, or was in vain

    def note_refused(self, size: int) -> None:
        """A message of that many bytes has no room."""
        self._refused = size

    def show(self, now: float, *, is_awaited: bool) -> None:
        """Updates the rows; `is_awaited`: a coroutine waits to send."""
        table, outbox, sending = self._table, self._session.outbox, self._sending
        if not table.is_due(now):
            return
        if is_awaited:
            self._refused = sending.wanted
        full = outbox.full(self._refused)
        if not full:
            self._refused = 0
        table.show_own(0, outbox.next, outbox.bytes, sending.waits, now, rank=None)
        for row, peer in enumerate(self._session.places.peers, start=1):
            is_full, since = peer in full, peer.lost_since
            who = peer.generation, peer.rank, peer.pid
            shown = who, peer.life, peer.taken, peer.last_progress, is_full, since
            if not table.is_shown(row, shown) or since is not None:
                table.show_peer(
                    row,
                    facts_of(peer, outbox.next, now),
                    peer.rank_or_usual,
                    peer.taken,
                    peer.first,
                    now,
                    is_in_the_way=is_full,
                )
        table.rest(now)


def _shown_rank(rank: int | None) -> int:
    """A rank as slots have it, or 0: a slot has no room for the largest."""
    return 0 if rank is None or rank >= (1 << 32) - 1 else 1 + rank


def _ns(seconds: float) -> int:
    return int(1e9 * seconds)
