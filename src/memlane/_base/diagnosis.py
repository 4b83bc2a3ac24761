"""Says what went wrong and who is to blame: the exception for a failed native call, the log line
of a long wait, and when that line is due.

The bindings call the functions that are installed at the end; waits in Python use a `Stall`.
logging is imported only when there is something to log.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from memlane._base import blame
from memlane._base.blame import VLLM_WORDS, Facts, listed, role_name
from memlane._base.lifetime import is_left_behind
from memlane._base.naming import names_of
from memlane._base.processes import name_of
from memlane._base.slots import Seen, facts_of, seen
from memlane._importing import fork_waits
from memlane._native import RingReader, install
from memlane.errors import (
    Cancelled,
    Closed,
    ConcurrentUse,
    CorruptMessage,
    MemlaneError,
    OutOfMemory,
    ReaderDied,
    ShmExhausted,
    SpaceHolder,
    TimedOut,
    ViewInUse,
    WriterClosed,
    WriterDied,
    WrongProcess,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from memlane._native import RingWriter

    RingEnd = RingReader | RingWriter


class End(Protocol):
    """The interface that the native ends of all systems share."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    def participant(self, slot: int) -> tuple[str, bytes, int]: ...


class Awaited:
    """`prefix` and the peers that a call of `end` waits for; formatted when first read.

    Polling therefore does not pay for the text. Keeps a snapshot of the peers, not the end.
    """

    __slots__ = ("_origin", "_peers", "_prefix", "_ranks", "_text")

    def __init__(self, end: RingEnd, prefix: str = "") -> None:
        self._prefix = prefix
        self._peers = end.awaited()
        if isinstance(end, RingReader):
            self._ranks, self._origin = None, end.origin
        else:
            self._ranks, self._origin = end.ranks, None
        self._text = ""

    def __str__(self) -> str:
        if not self._text:
            peers = {slot: seen(*each) for slot, each in self._peers.participants().items()}
            writer = peers.pop(0)
            if self._ranks is None:
                awaited = [_writer(writer, self._origin)]
            else:
                sent, ranks = writer.slot.position, self._ranks
                awaited = [_reader(who, ranks[slot - 1], sent) for slot, who in peers.items()]
            self._text = self._prefix + listed(awaited)
        return self._text

    def __repr__(self) -> str:
        return repr(str(self))

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


_TEXTS: dict[str, tuple[type[MemlaneError], str]] = {
    "closed": (Closed, "this queue is closed"),
    "writer_closed": (
        WriterClosed,
        "the writer closed the queue, and everything it sent has been read",
    ),
    "writer_left": (Closed, "the writer closed the queue before all readers had attached"),
    "wrong_process": (
        WrongProcess,
        "this object was opened in the parent process, before the fork; only close() may be "
        "called here. Create or attach a new one in the child",
    ),
    "concurrent_use": (
        ConcurrentUse,
        "another call on this queue is under way; one thread at a time may use it",
    ),
    "block_open": (
        ConcurrentUse,
        "a block of acquire_write or acquire_read is open on this queue; leave it first",
    ),
    "unexpected": (
        MemlaneError,
        "a native call returned an unexpected status; please report this bug",
    ),
    "refused_chunk_in_use": (
        ViewInUse,
        "a reference to the chunk of an unpublished block is still alive; drop it first, because "
        "it could change the next message",
    ),
    "corrupt": (
        CorruptMessage,
        "the chunk is not a memlane message (was it filled with acquire_write?); skipped",
    ),
    "write_view_in_use": (
        ViewInUse,
        "a reference to the chunk outlived its block and could change the message later; nothing "
        "was published",
    ),
    "read_view_in_use": (
        ViewInUse,
        "a reference to the chunk outlived its block; nobody writes to the chunk before the last "
        "reference is gone",
    ),
    "not_in_chunk": (
        CorruptMessage,
        "the message is in no chunk: it was sent by enqueue; skipped. Use dequeue or dequeue_view",
    ),
    "chunks_kept": (
        ViewInUse,
        "views keep the bytes of every chunk that is free, so there is none to write to; enqueue "
        "an object, which needs none, or drop views",
    ),
    "undecoded": (
        ConcurrentUse,
        "the next message could not be decoded, for lack of memory or because of an interrupt; "
        "dequeue it first",
    ),
    "next_chunk_held": (
        ViewInUse,
        "the next message needs a chunk that this reader still holds a reference to; drop that "
        "reference first",
    ),
}


def participant(end: End, slot: int) -> Seen:
    """The participant in `slot` (0: the writer, 1 + place: a reader). Makes a few system calls."""
    return seen(*end.participant(slot))


def failure(end: RingEnd, what: str, slot: int, timeout: float | None) -> MemlaneError | SystemExit:
    """The exception for the failure `what` of `end`; `slot` is the peer concerned."""
    if what in ("closed", "peer_died") and is_left_behind():  # the exit has closed both ends
        return SystemExit()
    match what:
        case "timed_out":
            late = f"{_of_queue(end)}timed out after {timeout} s waiting for "
            return TimedOut(Awaited(end, late), timeout)
        case "not_ready":
            missing = names_of(absent_readers(end))
            late = f"{_of_queue(end)}timed out after {timeout} s waiting for {missing}"
            return TimedOut(late, timeout)
        case "cancelled":
            return Cancelled()
        case "peer_died":
            return _death(end, slot)
        case "no_memory":
            return no_memory()
    kind, text = _TEXTS[what]
    return kind(text)


def _of_queue(end: RingEnd) -> str:
    """The beginning of an error about a queue that has a name."""
    return f"queue {end.label}: " if end.label else ""


def no_memory() -> OutOfMemory:
    """The error of a reader that lacks memory to decode a message."""
    return OutOfMemory(
        errno.ENOMEM,
        "this process has no memory for the next message, which is not consumed: free some, and "
        "dequeue it again",
    )


def exhausted(end: RingWriter, need: int, free: int, cause: int) -> ShmExhausted:
    """The error of a writer that lacks space: who keeps how much, if the file system is full."""
    if cause != errno.ENOSPC:
        return ShmExhausted(need, free, cause)
    holders = tuple(
        SpaceHolder(end.ranks[slot - 1], participant(end, slot).slot.pid, *numbers)
        for slot, *numbers in end.kept()
    )
    return ShmExhausted(need, free, cause, holders=holders, others=end.used_by_others())


def view_in_use(what: str) -> MemlaneError:
    """The error for a zero-copy block that ends while an object of type `what` is still in use."""
    return ViewInUse(
        f"a reference to the {what} of a view, besides the block's own name, outlived the block; "
        f"nobody writes to the memory before the last reference is gone"
    )


def _death(end: RingEnd, slot: int) -> MemlaneError:
    who = participant(end, slot)
    where = "" if who.is_of_here else " in its own pid namespace, which is not this one,"
    taken = who.slot.position if slot == 0 else who.slot.taken(end.has_late_readers)
    queue = f" of queue {end.label}" if end.label else ""
    detail = f"{where} after {taken} messages{queue}, {who.last_progress}"
    pid = who.slot.pid
    if isinstance(end, RingReader) and slot == 0:
        if (origin := end.origin) is None:
            return WriterDied(pid, detail)
        writer, address = origin
        return WriterDied(writer, f" at {address}, or its relay here (pid {pid}) did{detail}")
    if end.slot == 0:
        rank = end.ranks[slot - 1]
        detail += f"; call release_reader({rank}) to continue without it"
    return ReaderDied(end.ranks[slot - 1], pid, detail)


def _writer(who: Seen, origin: tuple[int, str] | None) -> Facts:
    if origin is None:
        return facts_about(who, "the writer")
    pid, address = origin
    return facts_about(who, "the relay", origin=f" of the writer (pid {pid} at {address})")


def _reader(who: Seen, rank: int, sent: int) -> Facts:
    behind = 0 if who.state == "absent" else max(0, sent - who.slot.position)
    return facts_about(who, role_name("reader", rank), behind=behind)


def facts_about(who: Seen, name: str, **more: Any) -> Facts:
    """The facts about a participant of a segment of this process; `more` are others of `Facts`."""
    slot = who.slot
    about: dict[str, Any] = {
        "activity": slot.activity,
        "views": slot.views,
        "views_for": (who.at - slot.views_since) / 1e9,
        "silent_for": (who.at - slot.last_progress) / 1e9,
    }
    return facts_of(name, who.state, slot.pid or None, slot.start_ticks, **about | more)


def absent_readers(end: RingEnd) -> list[str]:
    """Names readers that have not attached; only counts those on other hosts."""
    absent = [
        f"reader {rank} (never attached)"
        for slot, rank in enumerate(end.ranks, start=1)
        if participant(end, slot).state == "absent"
    ]
    elsewhere = end.absent_elsewhere
    if elsewhere:
        absent.append(f"{elsewhere} readers on other hosts (never attached)")
    return absent


# The log ------------------------------------------------------------------------------------------


def warn(text: str, *args: object) -> None:
    """Logs a warning."""
    with fork_waits:
        import logging

    logging.getLogger("memlane").warning(text, *args)


# The second is vLLM's, which its users may have set.
INTERVAL_SETTINGS = ("MEMLANE_RINGBUFFER_WARNING_INTERVAL", "VLLM_RINGBUFFER_WARNING_INTERVAL")
DEFAULT_INTERVAL = 5.0

_complained_of: set[str] = set()


def warning_interval() -> float:
    """Seconds until a wait is first logged; may be a fraction. Read from the environment on every
    use, so that it can be changed at any time."""
    name = next((name for name in INTERVAL_SETTINGS if os.environ.get(name)), None)
    if name is None:
        return DEFAULT_INTERVAL
    text = os.environ[name]
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    # At most a year: the setting may be infinite.
    if seconds > 0:
        return min(seconds, 3.2e7)
    if text in _complained_of:
        return DEFAULT_INTERVAL
    _complained_of.add(text)
    warn("%s=%r is not a positive number of seconds; using %s", name, text, DEFAULT_INTERVAL)
    return DEFAULT_INTERVAL


_SHORT = 0.1  # seconds: most waits are over by then, and never read the environment
_LONGEST_SILENCE = 60.0  # seconds between two lines about one wait


class Stall:
    """One wait in Python. Logs whom it waits for, at intervals that double up to a minute.

    Args:
        line: returns the text for a wait of that many seconds, or None if there is nobody to name.
    """

    def __init__(self, line: Callable[[float], str | None]) -> None:
        self._line = line
        self._started = time.monotonic()
        self._pause: float | None = None
        self._next = self._started + _SHORT

    def due(self, most: float) -> float:
        """Seconds until `report` has something to do, never more than `most`."""
        return min(most, max(0.0, self._next - time.monotonic()))

    def report(self) -> None:
        """Logs one line if one is due."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._pause is None:
            self._pause = warning_interval()
            self._next = self._started + self._pause
            if now < self._next:
                return
        self._pause = min(2 * self._pause, _LONGEST_SILENCE)
        self._next = now + self._pause
        line = self._line(now - self._started)
        if line is not None:
            warn("%s", line)


def report_deserted(end: RingWriter, since: int) -> None:
    """Logs that a writer sends messages that nobody will read; `since` is a time in nanoseconds."""
    warn("%s", deserted(end.ranks, time.monotonic() - since / 1e9))


def deserted(ranks: Sequence[int], seconds: float) -> str:
    """The line about a writer whose readers, of these ranks, have all left so long ago."""
    names = names_of([f"reader {rank}" for rank in ranks])
    return (
        f"the writer (pid {os.getpid()}) sends to nobody: {names} left (closed or "
        f"released), the last {seconds:.1f} s ago; close() the queue"
    )


def blocked(who: str, waited: float, reason: str, awaited: object, label: str = "") -> str:
    """The line about a wait of this process: who waits, how long, what for, and for whom; `label`
    is the name of the queue, if it has one."""
    pid, where = os.getpid(), f" of {label}" if label else ""
    return blame.blocked(blame.headline(who, pid, name_of(pid), waited, reason, where), awaited)


def report(end: RingEnd, wait: str, waited: float) -> None:
    """Logs one line about a wait of `end` that has lasted `waited` seconds so far."""
    warn("%s", stall_line(end, wait, waited))


def stall_line(end: RingEnd, wait: str, waited: float) -> str:
    """The line about a wait of `end` that has lasted `waited` seconds so far."""
    match wait:
        case "chunk":
            return blocked("writer", waited, f"no free chunk{VLLM_WORDS}", Awaited(end), end.label)
        case "ready":
            reason = "not all readers have attached to the queue"
            absent = names_of(absent_readers(end))
            return blocked(role_of(end), waited, reason, absent, end.label)
        case _:
            return blocked(role_of(end), waited, "no new message", Awaited(end), end.label)


def role_of(end: RingEnd) -> str:
    """`writer`, or `reader` and its rank."""
    return f"reader {end.ranks[end.slot - 1]}" if isinstance(end, RingReader) else "writer"


install(
    failure=failure,
    exhausted=exhausted,
    report=report,
    report_deserted=report_deserted,
    warn=warn,
    warning_interval=warning_interval,
)
