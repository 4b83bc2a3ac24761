"""Every error that memlane raises, grouped by its cause: the caller, a peer, data, the machine.

Each is a `MemlaneError` and also the builtin that fits, so callers may catch either. The data in
its text is also in attributes, and both survive pickling.
"""

from __future__ import annotations

import errno
import os
import signal
from typing import Any, NamedTuple

from memlane._importing import fork_waits


class MemlaneError(Exception):
    """Base of all errors that memlane raises.

    Attributes:
        sent: if `enqueue_many` has raised it, how many of the objects were sent.
    """

    sent = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[MemlaneError], args: tuple[object, ...], attributes: dict[str, object]
) -> MemlaneError:
    """Rebuilds an error without calling __init__, whose parameters are not those in `args`."""
    # Of the two bases, `__base__` is the one that determines the memory layout.
    layout: Any = kind.__base__
    error: MemlaneError = layout.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


# The caller ------------------------------------------------------------------------------------


class InvalidArgument(MemlaneError, ValueError):
    """An argument has an invalid value; nothing was created or changed."""


class InvalidType(MemlaneError, TypeError):
    """An argument has the wrong type; nothing was created or changed."""


class Unsupported(MemlaneError, NotImplementedError):
    """This machine, build or installation lacks what the call needs; the text says what."""


class Closed(MemlaneError, RuntimeError):
    """The queue, store or region was closed in this process; see also `WriterClosed`."""


class WrongRole(MemlaneError, RuntimeError):
    """A reader's method was called on a writer, or the reverse."""


class WrongProcess(MemlaneError, RuntimeError):
    """The object belongs to a parent process, which forked this one."""


class ConcurrentUse(MemlaneError, RuntimeError):
    """Another call on the same object is in progress; this one changed nothing."""


class RankTaken(MemlaneError, ValueError):
    """The rank is or was attached, or no places are left."""


class OutsideCell(MemlaneError, ValueError, AssertionError):
    """A view would exceed its worker's cell of the region; none was created."""


class ViewInUse(MemlaneError, BufferError):
    """A reference to shared memory outlives its block; the text names its type if it was found."""


# The call --------------------------------------------------------------------------------------


class Cancelled(MemlaneError, RuntimeError):
    """The `cancel` event of the call was set; or a worker skipped a call that was cancelled."""

    def __init__(self) -> None:
        super().__init__("cancelled")


class TimedOut(MemlaneError, TimeoutError):
    """`timeout` seconds passed; nothing was sent or consumed. If `close` raises it, all is closed.

    To keep polling cheap, a queue's text is formatted when it is first read. It describes the
    processes partly as they are at that moment.

    Attributes:
        timeout: in seconds.
        ranks: if `close` raised it, the readers that may not have received everything.
    """

    def __init__(
        self, message: object, timeout: float | None = None, ranks: tuple[int, ...] = ()
    ) -> None:
        super().__init__(message)
        self.timeout = timeout
        self.ranks = ranks


class CallTimedOut(TimedOut):
    """Workers did not answer a call in time. They go on with it; their answers are dropped.

    Attributes:
        ranks: the workers that have not answered.
    """


# Peers -----------------------------------------------------------------------------------------


class WriterClosed(Closed):
    """The writer closed the queue, and everything it sent has been read."""


class PeerDied(MemlaneError, RuntimeError):
    """A process of the queue ended without close(), or is considered dead.

    Attributes:
        pid: of that process.
    """

    pid: int


class ReaderDied(PeerDied):
    """Reader `rank`, process `pid`, ended without close(). The call has sent nothing.

    Attributes:
        rank: None for a process that ended before it attached, so that its rank is not known.
        exitcode: of such a process, if the caller has started it; negative for a signal.
    """

    def __init__(
        self, rank: int | None, pid: int, detail: str = "", exitcode: int | None = None
    ) -> None:
        who = f"process {pid}" if rank is None else f"reader {rank} (pid {pid})"
        how = "" if exitcode is None else f": exit code {exitcode}"
        super().__init__(f"{who} died{detail}{how}")
        self.exitcode = exitcode
        self.rank: Any = rank  # not `int | None`: it is an int wherever a queue is in use
        self.pid = pid


class ReaderGivenUp(PeerDied):
    """The writer declared this reader dead, and continues without it.

    Attributes:
        rank, pid: of this reader.
    """

    def __init__(self, rank: int, pid: int, detail: str) -> None:
        super().__init__(
            f"the writer declared this reader dead ({detail}) and no longer sends to it"
        )
        self.rank = rank
        self.pid = pid


class WriterDied(PeerDied):
    """The writer, process `pid`, ended without close(); its complete messages were delivered.

    Attributes:
        rank: of the writer, in a `Gather`; else None.
    """

    def __init__(self, pid: int, detail: str = "", rank: int | None = None) -> None:
        who = "the writer" if rank is None else f"writer {rank}"
        super().__init__(f"{who} (pid {pid}) died{detail}")
        self.pid = pid
        self.rank: Any = rank  # not `int | None`: it is an int wherever a gather is read


class WorkerDied(PeerDied):
    """Worker `rank` of a group, process `pid`, ended before the group was closed.

    Each call that it has not answered it may have run once, in part, or not at all.

    Attributes:
        rank, pid: of the worker.
        exitcode: as of a process of multiprocessing, negative for a signal; None if it is unknown.
    """

    def __init__(self, rank: int, pid: int, exitcode: int | None = None, detail: str = "") -> None:
        how = "ended" if exitcode is None else f"left with exit code {exitcode}"
        if exitcode is not None and exitcode < 0:
            known = {number.value: number.name for number in signal.Signals}
            how = f"was killed by {known.get(-exitcode, f'signal {-exitcode}')}"
        super().__init__(f"worker {rank} (pid {pid}) {how}{detail}")
        self.rank, self.pid, self.exitcode = rank, pid, exitcode


class WriterUnreachable(MemlaneError, ConnectionError):
    """Nobody answers at a handle's `address`; nothing was attached."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"the writer at {address} cannot be reached: {why}. It may have closed or died, or "
            f"its address may not be one that this host can reach (see connect_ip)"
        )
        self.address = address


class AccessRefused(MemlaneError, PermissionError):
    """A network peer could not authenticate with the handle's keys; nothing was attached.

    `AccessDenied` is raised if the operating system refuses a call.
    """


# The group ------------------------------------------------------------------------------------


class RankMissing(TimedOut):
    """Ranks of a group did not join a collective call in time.

    Attributes:
        ranks: the missing ones, as positions in the group.
    """


class GroupFailed(MemlaneError, RuntimeError):
    """A collective call failed because of another rank or the group itself.

    Attributes:
        rank: the rank that failed; None if it was the group.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


# The data --------------------------------------------------------------------------------------


class CorruptMessage(MemlaneError, ValueError):
    """A message was not written by memlane, or is damaged; it was consumed."""


class LayoutMismatch(MemlaneError, ValueError):
    """A segment's layout or geometry, or the version of a peer on another host, differs from this
    process's; the text states both."""


class ObjectGone(MemlaneError, ValueError):
    """A storage has no object of that id at that address (any more); no value was returned."""


class UnknownKey(MemlaneError, KeyError):
    """A storage has no object under that key (any more)."""

    __str__ = Exception.__str__  # KeyError's own shows the repr of the text


class WorkerError(MemlaneError, RuntimeError):
    """A worker's exception cannot be pickled or rebuilt; the text has its type and message."""


# The store -------------------------------------------------------------------------------------


class StoreFull(MemlaneError, MemoryError):
    """A ring is too small, or full while its oldest allocation cannot be freed; nothing was stored.

    Attributes:
        need: number of bytes requested.
        key: key of the object to be stored; None for a ring without a storage.
        kept: key of the oldest object, which cannot be evicted; None if there is none.
        readers: a `memlane.StoreBlocker` for each that has not read it or holds a view of it.
    """

    def __init__(
        self,
        message: str,
        need: int,
        key: object = None,
        kept: object = None,
        readers: tuple[Any, ...] = (),
    ) -> None:
        super().__init__(message)
        self.need = need
        self.key = key
        self.kept = kept
        self.readers = readers


# Moving blocks ---------------------------------------------------------------------------------


class PairRefused(InvalidArgument):
    """A pair of block ids cannot be moved; nothing was moved.

    Attributes:
        reason: "no_such_source", "no_such_target", "target_twice" or "overlap".
        pair: its index in `pairs`.
        block: the offending id, if there is one.
    """

    def __init__(self, message: str, reason: str, pair: int, block: int | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.pair = pair
        self.block = block


class CopyFailed(MemlaneError, RuntimeError):
    """CUDA refused a copy to or from a GPU; the `queued` copies before it are done.

    Attributes:
        code: CUDA's error number.
        queued: number of copies that CUDA had accepted.
    """

    def __init__(self, code: int, reason: str, queued: int) -> None:
        super().__init__(f"CUDA refused a copy ({reason}, error {code}) after {queued} others")
        self.code = code
        self.queued = queued


# The machine -----------------------------------------------------------------------------------


class SegmentMissing(MemlaneError, FileNotFoundError):
    """There is no segment called `name` (any more)."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"shared memory segment {name!r} is missing: {why}")
        self.name = name

    # Hides OSError's own fields: if they were set, str() would not show the text above.
    errno = errno.ENOENT

    @property
    def filename(self) -> str:
        return f"/dev/shm/{self.name}"


class SegmentExists(MemlaneError, FileExistsError):
    """The `name` for a new segment is in use; nothing was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"/dev/shm/{name} already exists, and a living process uses it or it is not memlane's; "
            f"choose another name, or omit it"
        )
        self.name = name

    errno = errno.EEXIST

    @property
    def filename(self) -> str:
        return f"/dev/shm/{self.name}"


class SegmentRefused(MemlaneError, PermissionError):
    """A file's owner, mode or type is not what memlane creates for this user."""


def foreign_segment(path: str, owner: int, remedy: str) -> SegmentRefused:
    """The error for another user's file; `remedy` says what to do."""
    return SegmentRefused(
        f"{path} belongs to {_name_of(owner)}, not to {_name_of(os.geteuid())}; {remedy}"
    )


def _name_of(user: int) -> str:
    with fork_waits:
        import pwd  # imported late: only this text needs it

    try:
        return f"user {pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"


class NameTaken(MemlaneError, FileExistsError):
    """A living process serves under this name; nothing was changed.

    Attributes:
        name: that name.
        pid: of that process; 0 if it is in another pid namespace, or too busy to be asked.
    """

    errno = errno.EEXIST

    def __init__(self, name: str, pid: int) -> None:
        who = f"process {pid}" if pid else "another process"
        super().__init__(f"{name!r} is served by {who}; end it, or serve under another name")
        self.name = name
        self.pid = pid


class TierInUse(MemlaneError, RuntimeError):
    """Another tier, of this process or another, has these files open.

    Attributes:
        pid: its process, as seen in its own pid namespace; 0 if it is unknown.
    """

    def __init__(self, path: str, pid: int) -> None:
        self.pid = pid
        holder = f"process {pid}" if pid else "another process"
        super().__init__(f"{path} is in use by {holder}; give another opener or path")


class SystemFault(MemlaneError, OSError):
    """A system call failed; `errno` says why."""


class AccessDenied(SystemFault, PermissionError):
    """The operating system refused a call (EACCES, EPERM, EROFS).

    `AccessRefused` is raised if a network peer is not admitted.
    """


class OutOfMemory(SystemFault, MemoryError):
    """The system has no memory for the call, or no room for another file."""


def system_fault(number: int, what: str) -> SystemFault:
    """The error for a system call that failed with errno `number`; `what` says what it was for."""
    hint = _FAULT_HINTS.get(number) if number != errno.ENOENT else _missing_place(what)
    if hint is not None and "/dev/shm" not in what:
        hint = hint.replace("/dev/shm", "that file system")  # `directory=` of a region
    return _FAULTS.get(number, SystemFault)(number, f"{what}; {hint}" if hint else what)


def _missing_place(what: str) -> str | None:
    return "mount a tmpfs at /dev/shm" if "/dev/shm" in what else None


_FAULTS: dict[int, type[SystemFault]] = {
    errno.EACCES: AccessDenied,
    errno.EPERM: AccessDenied,
    errno.EROFS: AccessDenied,
    errno.ENOMEM: OutOfMemory,
    errno.ENOSPC: OutOfMemory,
    errno.EDQUOT: OutOfMemory,
}
_FAULT_HINTS = {
    errno.EAGAIN: (
        "end other threads or processes of this user, or raise the limit (`ulimit -u`; in a "
        "container, its limit of pids)"
    ),
    errno.EMFILE: "close descriptors or raise the limit (`ulimit -n`)",
    errno.ENFILE: "the whole system has too many open files (see `sysctl fs.file-max`)",
    errno.EROFS: "mount /dev/shm so that it can be written to",
    errno.EACCES: "this user must be able to write to /dev/shm",
    errno.ENOSPC: "the file system may have no room for another file (see `df` and `df -i`)",
    errno.ENOMEM: "see the limits of this process and of its cgroup",
    errno.EOPNOTSUPP: "/dev/shm must be a tmpfs",
}


class SpaceHolder(NamedTuple):
    """The shared memory that a reader keeps, of messages that it has read.

    Attributes:
        rank, pid: of the reader.
        lent_messages, lent_bytes: messages whose arrays `dequeue` lent and the reader still keeps.
        viewed_messages, viewed_bytes: messages of which it keeps a view.
    """

    rank: int
    pid: int
    lent_messages: int
    lent_bytes: int
    viewed_messages: int
    viewed_bytes: int

    def __str__(self) -> str:
        kept = []
        if self.lent_messages:
            kept.append(f"{_messages('lent message', self.lent_messages)} of {self.lent_bytes}")
        if self.viewed_messages:
            messages = _messages("message", self.viewed_messages)
            kept.append(f"views of {messages} of {self.viewed_bytes}")
        return f"reader {self.rank} (pid {self.pid}) keeps {' bytes and '.join(kept)} bytes"


def _messages(what: str, count: int) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class ShmExhausted(MemlaneError, MemoryError):
    """`need` bytes were requested, `free` are available; nothing was created, sent or changed.

    Attributes:
        need, free: in bytes.
        hint: what to do.
        holders: a `SpaceHolder` for each reader of the queue that keeps lent messages or views.
        others: bytes that other files in /dev/shm use; None if not known.
    """

    def __init__(
        self,
        need: int,
        free: int,
        cause: int = errno.ENOSPC,
        hint: str | None = None,
        holders: tuple[SpaceHolder, ...] = (),
        others: int | None = None,
    ) -> None:
        self.need = need
        self.free = free
        self.hint = hint or _EXHAUSTION_HINTS.get(cause, _EXHAUSTION_HINTS[errno.ENOSPC])
        self.holders = holders
        self.others = others
        if holders:
            self.hint = f"drop arrays or views that readers keep, {self.hint}"
        facts = [str(holder) for holder in holders]
        if others is not None:
            facts.append(f"other files use {others} bytes")
        told = "".join(f"; {fact}" for fact in facts)
        super().__init__(f"need {need} bytes of shared memory, {free} are free{told}: {self.hint}")


_EXHAUSTION_HINTS = {
    errno.ENOSPC: (
        "free space in /dev/shm or make it larger (docker: --shm-size; kubernetes: an emptyDir "
        "with medium: Memory mounted at /dev/shm), or ask for less"
    ),
    errno.EDQUOT: "the quota of this user in /dev/shm is used up; free space, or ask for less",
    errno.EFBIG: "no file may be that large (see `ulimit -f`); ask for less, or raise the limit",
    errno.ENOMEM: (
        "this process may not map that much memory (see `ulimit -v` and the cgroup's limit); ask "
        "for less, or raise the limit"
    ),
}
