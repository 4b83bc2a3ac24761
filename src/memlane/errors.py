"""What can go wrong, by fault: you, they, the data, the machine.

Every error is a `MemlaneError` and also the builtin that fits, so callers may catch either. What
its text says is in its attributes, too, and both survive pickling.
"""

from __future__ import annotations

import errno
import os
from typing import Any


class MemlaneError(Exception):
    """Base of all errors that memlane raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    kind: type[MemlaneError], args: tuple[object, ...], attributes: dict[str, object]
) -> MemlaneError:
    """Past __init__, whose parameters are not what `args` holds."""
    # `__base__` is the one of the two bases whose memory layout the class has.
    layout: Any = kind.__base__
    error: MemlaneError = layout.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


# You -------------------------------------------------------------------------------------------


class InvalidArgument(MemlaneError, ValueError):
    """A value that cannot be; nothing was created or changed."""


class InvalidType(MemlaneError, TypeError):
    """A value of the wrong type; nothing was created or changed."""


class Unsupported(MemlaneError, NotImplementedError):
    """This machine, build or installation lacks what the call needs; the text says what."""


class Closed(MemlaneError, RuntimeError):
    """This end was closed; see also `WriterClosed`."""


class WrongRole(MemlaneError, RuntimeError):
    """A reader's method was called on a writer, or the reverse."""


class WrongProcess(MemlaneError, RuntimeError):
    """The object belongs to the process that forked this one."""


class ConcurrentUse(MemlaneError, RuntimeError):
    """Another call on the same end is under way; this one changed nothing."""


class RankTaken(MemlaneError, ValueError):
    """Somebody has, or had, that reader's place."""


class OutsideCell(MemlaneError, ValueError, AssertionError):
    """A view would leave its worker's cell of the region; nothing was given out."""


class ViewInUse(MemlaneError, BufferError):
    """Something still refers to memory that is about to be given back."""


# The call --------------------------------------------------------------------------------------


class Cancelled(MemlaneError, RuntimeError):
    """The `cancel` event of the call was set."""

    def __init__(self) -> None:
        super().__init__("cancelled")


class TimedOut(MemlaneError, TimeoutError):
    """The time of the call was over; it has sent and consumed nothing. `close` has closed.

    A queue's text is made when it is first asked for, so that polling is cheap: what it says of
    processes is partly of that moment.
    """

    def __init__(self, message: object, timeout: float | None = None) -> None:
        super().__init__(message)
        self.timeout = timeout


# They ------------------------------------------------------------------------------------------


class WriterClosed(Closed):
    """The writer closed the queue, and everything that it sent has been read."""


class PeerDied(MemlaneError, RuntimeError):
    """A process of the queue ended without close(), or was declared dead.

    Attributes:
        pid: of that process.
    """

    pid: int


class ReaderDied(PeerDied):
    """A reader's process ended without close(). The call has sent nothing."""

    def __init__(self, rank: int, pid: int, detail: str = "") -> None:
        super().__init__(f"reader {rank} (pid {pid}) died{detail}")
        self.rank = rank
        self.pid = pid


class ReaderGivenUp(PeerDied):
    """The writer took this reader for dead, and goes on without it.

    Attributes:
        rank, pid: this reader's own.
    """

    def __init__(self, rank: int, pid: int, detail: str) -> None:
        super().__init__(f"the writer has given up this reader ({detail}); no more comes to it")
        self.rank = rank
        self.pid = pid


class WriterDied(PeerDied):
    """The writer's process ended without close(); all its complete messages were delivered."""

    def __init__(self, pid: int, detail: str = "") -> None:
        super().__init__(f"the writer (pid {pid}) died{detail}")
        self.pid = pid


class WriterUnreachable(MemlaneError, ConnectionError):
    """Nobody answers at the address of a handle; nothing was attached."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"the writer at {address} cannot be reached: {why}. It may have closed or died, or "
            f"its address may not be one that this host can reach (see connect_ip)"
        )
        self.address = address


class AccessRefused(MemlaneError, PermissionError):
    """A peer over the network could not prove who it is by the handle's keys; nothing was attached.

    What the operating system does not allow is `AccessDenied`.
    """


# The group ------------------------------------------------------------------------------------


class RankMissing(TimedOut):
    """Ranks of a group did not come to a collective call in time.

    Attributes:
        ranks: those, as positions in the group.
    """

    def __init__(
        self, message: str, ranks: tuple[int, ...] = (), timeout: float | None = None
    ) -> None:
        super().__init__(message, timeout)
        self.ranks = ranks


class GroupFailed(MemlaneError, RuntimeError):
    """A collective call came to nothing because of another rank, or of the group itself.

    Attributes:
        rank: that rank, None if it is the group.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


# The data --------------------------------------------------------------------------------------


class CorruptMessage(MemlaneError, ValueError):
    """A message was not what memlane writes; it was consumed."""


class LayoutMismatch(MemlaneError, ValueError):
    """A segment has another layout or geometry than the one asked for."""


class ObjectGone(MemlaneError, ValueError):
    """A storage has no object under that id at that address (any more); nothing was decoded."""


class UnknownKey(MemlaneError, KeyError):
    """A storage has no object under that key (any more)."""

    __str__ = Exception.__str__  # a KeyError would show the text as it shows a key


# The store -------------------------------------------------------------------------------------


class StoreFull(MemlaneError, MemoryError):
    """A ring has no room, and nothing more in it may be evicted; nothing was stored.

    Attributes:
        need: bytes that were asked for.
        key: of the object that was to be stored; None for a ring without a storage.
        kept: the key of the oldest object, which keeps its place; None if there is none.
        readers: who keeps it, as `memlane.StoreBlocker`: who has not read it, or holds a view.
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
    """A pair of block ids that cannot be moved; nothing was moved.

    Attributes:
        reason: "no_such_source", "no_such_target", "target_twice" or "overlap".
        pair: its index.
        block: the id that it is about.
    """

    def __init__(self, message: str, reason: str, pair: int, block: int | None) -> None:
        super().__init__(message)
        self.reason = reason
        self.pair = pair
        self.block = block


class CopyFailed(MemlaneError, RuntimeError):
    """CUDA refused a copy to or from a GPU; `queued` copies before it are done.

    Attributes:
        code: CUDA's number of the error.
        queued: how many copies it had taken.
    """

    def __init__(self, code: int, reason: str, queued: int) -> None:
        super().__init__(f"CUDA refused a copy ({reason}, error {code}) after {queued} others")
        self.code = code
        self.queued = queued


# The machine -----------------------------------------------------------------------------------


class SegmentMissing(MemlaneError, FileNotFoundError):
    """There is no segment of that name (any more)."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"shared memory segment {name!r} is missing: {why}")
        self.name = name

    # Not through OSError's own fields: with an errno in them the text above would not be shown.
    errno = errno.ENOENT

    @property
    def filename(self) -> str:
        return f"/dev/shm/{self.name}"


class SegmentExists(MemlaneError, FileExistsError):
    """A segment was to be created under a name that somebody uses; nothing was changed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"/dev/shm/{name} exists already, and a living process uses it or it is not memlane's; "
            f"choose another name, or none"
        )
        self.name = name

    errno = errno.EEXIST

    @property
    def filename(self) -> str:
        return f"/dev/shm/{self.name}"


class SegmentRefused(MemlaneError, PermissionError):
    """A segment's file is not what memlane creates for this user."""


def foreign_segment(path: str, owner: int, remedy: str) -> SegmentRefused:
    """The error for a file of another user; `remedy` says what to do."""
    return SegmentRefused(
        f"{path} belongs to {_name_of(owner)}, not to {_name_of(os.geteuid())}; {remedy}"
    )


def _name_of(user: int) -> str:
    import pwd  # reads the machine's list of users, which nobody else needs

    try:
        return f"user {pwd.getpwuid(user).pw_name} (uid {user})"
    except KeyError:
        return f"uid {user}"


class SystemFault(MemlaneError, OSError):
    """A system call failed; `errno` tells why."""


class AccessDenied(SystemFault, PermissionError):
    """The operating system refused a call (EACCES, EPERM, EROFS).

    A peer over the network that is not let in gets `AccessRefused`.
    """


class OutOfMemory(SystemFault, MemoryError):
    """The system has no memory for that, or no room for one more file."""


def system_fault(number: int, what: str) -> SystemFault:
    """The error of a system call that failed with errno `number`; `what` says in what."""
    hint = _FAULT_HINTS.get(number) if number != errno.ENOENT else _missing_place(what)
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
    errno.ENOSPC: "the file system may have no room for another file (see `df -i /dev/shm`)",
    errno.ENOMEM: "see the limits of this process and of its cgroup",
    errno.EOPNOTSUPP: "/dev/shm must be a tmpfs",
}


class ShmExhausted(MemlaneError, MemoryError):
    """Shared memory has no space for that; nothing was created, sent or changed."""

    def __init__(
        self, need: int, free: int, cause: int = errno.ENOSPC, hint: str | None = None
    ) -> None:
        self.need = need
        self.free = free
        self.hint = hint or _EXHAUSTION_HINTS.get(cause, _EXHAUSTION_HINTS[errno.ENOSPC])
        super().__init__(f"need {need} bytes of shared memory, {free} are free: {self.hint}")


_EXHAUSTION_HINTS = {
    errno.ENOSPC: (
        "free space in /dev/shm or make it larger (docker: --shm-size; kubernetes: an emptyDir "
        "with medium: Memory mounted at /dev/shm), or ask for less"
    ),
    errno.EFBIG: "no file may be that large (see `ulimit -f`); ask for less, or raise the limit",
    errno.ENOMEM: (
        "this process may not map so much memory (see `ulimit -v` and the cgroup's limit); ask for "
        "less, or raise the limit"
    ),
}
