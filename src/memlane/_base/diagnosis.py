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
from typing import TYPE_CHECKING, NamedTuple, Protocol

from memlane._base.lifetime import is_left_behind
from memlane._base.naming import MOST_NAMED, names_of
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


class Participant(NamedTuple):
    """A process as its slot describes it; times in nanoseconds of the monotonic clock."""

    # absent, running, stopped, dead, closed; or unknown: alive, but /proc cannot say more
    state: str
    pid: int
    position: int
    last_progress_ns: int
    is_waiting: bool  # blocked in a call of memlane
    views: int  # number of messages that its views keep
    views_since_ns: int  # when the oldest of them was taken
    seen_ns: int  # when all this was read
    is_pid_of_here: bool  # not of another pid namespace, where it is another process
    skipped: int  # messages that a reader of the latest did not get
    taken: int  # or published

    def since(self) -> str:
        """How long ago it last published, consumed or attached, as text."""
        return f"last progress {(self.seen_ns - self.last_progress_ns) / 1e9:.1f} s ago"

    def held(self) -> str:
        """How long it has kept the oldest of its views, as text."""
        return f"for {(self.seen_ns - self.views_since_ns) / 1e9:.1f} s"


class End(Protocol):
    """What the native ends of all systems have in common."""

    @property
    def slot(self) -> int: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    def participant(
        self, slot: int
    ) -> tuple[str, int, int, int, bool, int, int, int, bool, int, int]: ...


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
            peers = {slot: Participant(*seen) for slot, seen in self._peers.participants().items()}
            writer = peers.pop(0)
            if self._ranks is None:
                names = _writer(writer, self._origin)
            else:
                names = names_of(_blocking_readers(writer, peers, self._ranks))
            self._text = self._prefix + names
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


def participant(end: End, slot: int) -> Participant:
    """The participant in `slot` (0: the writer, 1 + place: a reader). Makes a few system calls."""
    return Participant(*end.participant(slot))


def failure(end: RingEnd, what: str, slot: int, timeout: float | None) -> MemlaneError | SystemExit:
    """The exception for the failure `what` of `end`; `slot` is the peer concerned."""
    if what in ("closed", "peer_died") and is_left_behind():  # the exit has closed both ends
        return SystemExit()
    match what:
        case "timed_out":
            return TimedOut(Awaited(end, f"timed out after {timeout} s waiting for "), timeout)
        case "not_ready":
            missing = names_of(absent_readers(end))
            return TimedOut(f"timed out after {timeout} s waiting for {missing}", timeout)
        case "cancelled":
            return Cancelled()
        case "peer_died":
            return _death(end, slot)
        case "no_memory":
            return no_memory()
    kind, text = _TEXTS[what]
    return kind(text)


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
        SpaceHolder(end.ranks[slot - 1], participant(end, slot).pid, *numbers)
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
    where = "" if who.is_pid_of_here else " in its own pid namespace, which is not this one,"
    detail = f"{where} after {who.taken} messages, {who.since()}"
    if isinstance(end, RingReader) and slot == 0:
        if (origin := end.origin) is None:
            return WriterDied(who.pid, detail)
        pid, address = origin
        return WriterDied(pid, f" at {address}, or its relay here (pid {who.pid}) did{detail}")
    if end.slot == 0:
        rank = end.ranks[slot - 1]
        detail += f"; call release_reader({rank}) to continue without it"
    return ReaderDied(end.ranks[slot - 1], who.pid, detail)


def _writer(writer: Participant, origin: tuple[int, str] | None) -> str:
    """Describes the writer that a reader waits for; one that is itself waiting is not to blame."""
    is_kept = writer.is_waiting and writer.state not in ("stopped", "dead", "closed")
    what = "itself waiting for a reader" if is_kept else doing(writer)
    who = f"(pid {writer.pid}, {what}, {writer.since()})"
    if origin is None:
        return f"the writer {who}"
    pid, address = origin
    return f"the relay {who} of the writer (pid {pid} at {address})"


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


def _blocking_readers(
    writer: Participant, seen: dict[int, Participant], ranks: Sequence[int]
) -> list[str]:
    """Describes the readers that a writer waits for: state, messages behind, last progress.

    One of them may be holding up the others (in a collective, say); the likeliest comes first.
    """
    readers = [(who, ranks[slot - 1]) for slot, who in seen.items()]
    readers.sort(key=lambda reader: _suspicion(reader[0]))
    named = [_behind(who, rank, writer.position) for who, rank in readers[:MOST_NAMED]]
    return named + ["another reader"] * (len(readers) - len(named))


def _suspicion(who: Participant) -> tuple[bool, bool, int]:
    """Sort key: first processes that cannot read, then those with views, then by how long they
    have made no progress."""
    can_read = who.state in ("running", "unknown")
    return can_read, can_read and not who.views, who.last_progress_ns


def _behind(who: Participant, rank: int, sent: int) -> str:
    if who.state == "absent":
        return f"reader {rank} (never attached)"
    parts = [f"pid {who.pid}", doing(who), f"{sent - who.position} behind", who.since()]
    if who.views:
        chunks = "1 chunk" if who.views == 1 else f"{who.views} chunks"
        parts.insert(2, f"holds views of {chunks} {who.held()}")
    return f"reader {rank} ({', '.join(parts)})"


def doing(who: Participant) -> str:
    """`who.state`; for a running process also whether it is on a core, or where it sleeps."""
    if who.state == "unknown":  # in another pid namespace; here its pid may be another process
        return "alive but not visible from here"
    if who.state != "running":
        return who.state
    try:
        stat = _text_of(f"/proc/{who.pid}/stat")
        where = _text_of(f"/proc/{who.pid}/wchan")
    except OSError:  # ended, or not readable by this user
        return who.state
    if stat.rpartition(")")[2].split()[0] == "R":
        return "running on a core"
    if where in ("", "0"):
        return who.state
    return f"running, its main thread asleep in the kernel ({where})"


def _text_of(path: str) -> str:
    with open(path, errors="replace") as file:  # a process may have any name, in any encoding
        return file.read()


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
        f"the writer (pid {os.getpid()}) sends to nobody: {names} closed or were released, the "
        f"last {seconds:.1f} s ago; close() the queue"
    )


VLLM_WORDS = " [No available shared memory broadcast block]"  # users of vLLM search for them


def blocked(who: str, waited: float, reason: str, awaited: object) -> str:
    """The line about a wait of this process: who waits, how long, what for, and for whom.

    `reason` may end with VLLM_WORDS, which then end the line.
    """
    words = VLLM_WORDS if reason.endswith(VLLM_WORDS) else ""
    return (
        f"{who} (pid {os.getpid()}) blocked for {waited:.1f} s: {reason.removesuffix(words)}; "
        f"waiting for {awaited}{words}"
    )


def report(end: RingEnd, wait: str, waited: float) -> None:
    """Logs one line about a wait of `end` that has lasted `waited` seconds so far."""
    warn("%s", stall_line(end, wait, waited))


def stall_line(end: RingEnd, wait: str, waited: float) -> str:
    """The line about a wait of `end` that has lasted `waited` seconds so far."""
    match wait:
        case "chunk":
            return blocked("writer", waited, f"no free chunk{VLLM_WORDS}", Awaited(end))
        case "ready":
            reason = "not all readers have attached to the queue"
            return blocked(role_of(end), waited, reason, names_of(absent_readers(end)))
        case _:
            return blocked(role_of(end), waited, "no new message", Awaited(end))


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
