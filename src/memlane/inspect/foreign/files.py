"""Files that engines leave in /dev/shm, and whether a process may still need them.

A file is in use if a process has it open or mapped. /proc shows that for the processes that this
user may see; where there may be others, the kernel is asked for a lease on the file, which it
grants only to the one process that has it open, wherever the others are.

A file that is not in use may still be needed: one process writes and closes it, and sends its name
to another, which opens it later. Nothing in the file tells. So such a file is unused only if it is
old, and no living process can have made it, or if the caller names it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import signal
import stat
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from memlane._base import processes
from memlane.errors import InvalidArgument, system_fault
from memlane.inspect.segment import FOLDER


class Kind(NamedTuple):
    """Files by how their names begin.

    Attributes:
        is_held: its maker has it open or mapped as long as anybody may need it.
        is_region: of blocks; memlane's own too, as a file or as one in a folder of that name.
        is_ring: what an engine's own queue may have.
        makers: words that stand in the memory map of each process that can have made one.
    """

    prefix: str
    is_held: bool = False
    is_region: bool = False
    is_ring: bool = False
    makers: tuple[bytes, ...] = (b"python", b"pypy", b"_posixshmem")


# The one table of names; the longest prefix counts.
KINDS = (
    Kind("psm_", is_ring=True),  # Python's SharedMemory: vLLM's rings, and any program's blocks
    Kind("vllm_offload_", is_held=True, is_region=True),
    Kind("VLLM_OBJECT_STORAGE_SHM_BUFFER", is_held=True),
    Kind("vllm_mm_"),
    Kind("vllm_ec_"),
    Kind("sgl_shm_"),
    Kind("sgl_shm_mq_", is_ring=True),
    Kind("multi_tokenizer_args_"),
    Kind("sglang_loads_"),
    Kind("nccl-", is_held=True),
)
_OLD = 600.0  # seconds: what is on its way to another process is opened before
_APART = 2.0  # seconds by which clocks of files and processes may differ
# Names of files that are handed over and name their creator.
_HANDED_OVER = re.compile(r"sgl_shm_.*?_(\d+)_|multi_tokenizer_args_(\d+)(?!\w)")
_REGION_FILE = "memlane"  # in a folder with the name of a region
_FIRST_NAMESPACE = 0xEFFFFFFC  # the kernel's PROC_PID_INIT_INO
_KERNEL_THREAD = 0x00200000  # PF_KTHREAD
_F_SETSIG = 10
_GONE = "it was removed or replaced meanwhile"

Lease = Literal["alone", "shared", "unknown"]


@dataclass(frozen=True)
class Unused:
    """A file that no process has open or mapped, or is about to open.

    Attributes:
        name: in /dev/shm.
        path: the same, whole.
        size: bytes of the file.
        used: bytes of /dev/shm that it takes.
        changed: when it was last written to or resized, in seconds since 1970.
        device, inode: which file it is, whatever its name.
        kind: of its name.
        is_named: the caller has asked for it by its name.
    """

    name: str
    path: str
    size: int
    used: int
    changed: float
    device: int
    inode: int
    kind: Kind
    is_named: bool = False


@dataclass(frozen=True)
class Kept:
    """A file that may be in use.

    Attributes:
        name, path, size, used: as of `Unused`.
        reason: why it is kept.
        pids: the processes that are known to have it open or mapped.
    """

    name: str
    path: str
    size: int
    used: int
    reason: str
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Sight:
    """Knowledge about who uses a file.

    Attributes:
        pids: the processes that have it open or mapped, as far as they can be seen.
        unseen: processes that could have it open, and do not show their files.
        hides: /proc does not list the processes of other users, and they could open the file.
        is_whole: no process of this /dev/shm is in a pid namespace that cannot be seen from here.
        lease: whether the kernel says that nobody else has it open; `unknown` if it was not asked,
            or cannot say.
        is_named: the caller has asked for it by its name, and knows that nobody will open it.
        creator: for a file that is handed over, the process in its name, if it lives.
        engine: for a file that is handed over, a process that has an engine's file open.
        maker: for a file that may be handed over, a process that lives and may have made it.
        age: for a file that may be handed over, the seconds since it was written.
    """

    pids: tuple[int, ...] = ()
    unseen: tuple[int, ...] = ()
    hides: bool = False
    is_whole: bool = True
    lease: Lease = "unknown"
    is_named: bool = False
    creator: int | None = None
    engine: int | None = None
    maker: int | None = None
    age: float | None = None


def reason_to_keep(sight: Sight, trusts_view: bool = False) -> str | None:
    """Returns why a file may be in use; None if it is unused.

    `trusts_view`: the caller knows that no process in another pid namespace uses it.
    """
    if sight.pids:
        return f"in use by {_named(sight.pids)}"
    if sight.lease == "shared":
        return "in use by a process that is not visible from here"
    if not sight.is_named and (reason := _reason_of_handing_over(sight, trusts_view)) is not None:
        return reason
    if sight.lease == "alone":
        return None
    if sight.unseen:
        return f"{_named(sight.unseen)} may have it open; root can see that"
    if sight.hides:
        return "/proc hides other users' processes, and one may have it open; root can see that"
    if not sight.is_whole and not trusts_view:
        return "processes of other containers on this /dev/shm cannot be seen from here"
    return None


def _reason_of_handing_over(sight: Sight, trusts_view: bool) -> str | None:
    """Returns why somebody may be about to open a file that nobody has open; a caller who names it
    knows better."""
    if sight.creator is not None:
        return f"its creator lives (pid {sight.creator}), and may have sent it to another process"
    if sight.engine is not None:
        return f"an engine is running (pid {sight.engine}), and may be about to open it"
    if sight.maker is not None:
        return f"pid {sight.maker} may have made it, and may have sent it to another process"
    if sight.age is not None and sight.age < _OLD:
        return f"it was written {sight.age:.0f} s ago, and may be on its way to another process"
    if sight.age is not None and not sight.is_whole and not trusts_view:
        return "a process of another container may have made it"
    return None


def _named(pids: tuple[int, ...]) -> str:
    more = f" and {len(pids) - 4} more" if len(pids) > 4 else ""
    return f"pid {', '.join(map(str, pids[:4]))}{more}"


# Looking ----------------------------------------------------------------------------------------


def unused(
    names: Collection[str] | None = None,
    *,
    kinds: Sequence[Kind] = KINDS,
    trusts_view: bool = False,
) -> tuple[list[Unused], list[Kept]]:
    """This user's files of engines: those that nobody uses, and those that may be in use.

    Args:
        names: only these, even if they are new, or their makers live; those that somebody has open
            are kept nevertheless.
        kinds: which files.
        trusts_view: remove also what only a process of another container could use, where the
            kernel cannot say whether one does.

    Raises:
        InvalidArgument: a name is not that of such a file.
        SystemFault: /dev/shm cannot be listed, or there is no /proc.
    """
    files = list(_files(kinds))
    if names is not None:
        found = {file.name for file in files}
        if missing := [name for name in names if name not in found]:
            raise InvalidArgument(
                f"{missing[0]!r} is no file of this user in {FOLDER} that engines make"
            )
        files = [replace(file, is_named=True) for file in files if file.name in names]
    free: list[Unused] = []
    kept: list[Kept] = []
    for file, sight in _sights(files):
        reason = reason_to_keep(sight, trusts_view)
        if reason is None:
            free.append(file)
        else:
            kept.append(_kept(file, reason, sight.pids))
    return free, kept


def remove(
    files: Iterable[Unused], *, trusts_view: bool = False
) -> tuple[list[Unused], list[Kept]]:
    """Unlinks those that are still the same file and still unused; (removed, kept).

    Raises:
        SystemFault: as `unused`.
    """
    removed: list[Unused] = []
    kept: list[Kept] = []
    for file, sight in _sights(list(files)):
        if _is_gone(file):
            reason: str | None = _GONE
        else:
            reason = reason_to_keep(sight, trusts_view) or _unlink(file)
        if reason is None:
            removed.append(file)
        else:
            kept.append(_kept(file, reason, sight.pids))
    return removed, kept


def _is_gone(file: Unused) -> bool:
    """Returns whether the name has another file by now, or none."""
    with suppress(FileNotFoundError, NotADirectoryError):
        facts = os.lstat(file.path)
        return (facts.st_dev, facts.st_ino) != (file.device, file.inode)
    return True


def _kept(file: Unused, reason: str, pids: tuple[int, ...] = ()) -> Kept:
    return Kept(file.name, file.path, file.size, file.used, reason, pids)


def _files(kinds: Sequence[Kind]) -> Iterator[Unused]:
    try:
        names = sorted(os.listdir(FOLDER))
    except OSError as error:
        raise system_fault(error.errno or 0, f"cannot list {FOLDER}") from None
    for name in names:
        known = [kind for kind in KINDS if name.startswith(kind.prefix)]
        kind = max(known, key=lambda kind: len(kind.prefix), default=None)
        if kind is None or kind not in kinds:
            continue
        has_inside = kind.is_region and _is_own_folder(name)
        for place in (f"{name}/{_REGION_FILE}", name) if has_inside else (name,):
            with suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile; a file
                facts = os.lstat(f"{FOLDER}/{place}")
                if facts.st_uid == os.geteuid() and _is_file(facts, f"{FOLDER}/{place}", kind):
                    yield Unused(
                        place,
                        f"{FOLDER}/{place}",
                        facts.st_size,
                        facts.st_blocks * 512,
                        facts.st_mtime,
                        facts.st_dev,
                        facts.st_ino,
                        kind,
                    )
                    break


def _is_own_folder(name: str) -> bool:
    """Another user's may be a link that leads to files elsewhere."""
    with suppress(FileNotFoundError):  # removed meanwhile
        facts = os.lstat(f"{FOLDER}/{name}")
        return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid()
    return False


def _is_file(facts: os.stat_result, path: str, kind: Kind) -> bool:
    """Returns whether it is a file, or the empty folder of a region."""
    if stat.S_ISDIR(facts.st_mode):
        return kind.is_region and not os.listdir(path)
    return stat.S_ISREG(facts.st_mode)


def _sights(files: list[Unused]) -> Iterator[tuple[Unused, Sight]]:
    """Each file, and who uses it now."""
    if not files:
        return
    if not os.path.exists("/proc/self/fd"):
        raise system_fault(errno.ENOENT, "cannot list the processes in /proc; mount it")
    holders, unseen, living = _processes()
    keys = {(file.device, file.inode) for file in _files(KINDS)}
    engine = next((min(pids) for key, pids in holders.items() if key in keys), None)
    is_hiding, is_whole = _hides(), _is_whole()
    for file in files:
        pids = tuple(sorted(holders.get((file.device, file.inode), ())))
        sight = Sight(
            pids,
            tuple(pid for pid, owner in unseen if _could_open(owner, file)),
            is_hiding,
            is_whole,
            is_named=file.is_named,
        )
        if not file.kind.is_held:
            maker = next((one.pid for one in living if one.may_have_made(file)), None)
            sight = replace(sight, maker=maker, age=max(0.0, time.time() - file.changed))
        if handed := _HANDED_OVER.match(file.name):
            creator = int(handed[1] or handed[2])
            lives = processes.start_ticks(creator) is not None
            # Its name says who made it, so no other process did.
            sight = replace(sight, creator=creator if lives else None, engine=engine, maker=None)
        # Asked last: a process that opens the file at that very moment waits for the answer.
        if not pids and reason_to_keep(sight) is not None:
            sight = replace(sight, lease=_lease_on(file))
        yield file, sight


@dataclass(frozen=True)
class _Living:
    """A process of this user.

    Attributes:
        started: in seconds since 1970.
        maps: the text of its memory map; of one that may not be read, its command line.
    """

    pid: int
    started: float
    maps: bytes

    def may_have_made(self, file: Unused) -> bool:
        if self.started > file.changed + _APART:
            return False
        return any(word in self.maps for word in file.kind.makers)


def _processes() -> tuple[dict[tuple[int, int], set[int]], list[tuple[int, int]], list[_Living]]:
    """The processes that have a file open or mapped, by device and inode; (pid, owner) of the
    processes that do not show it; and the processes of this user. A file may have another path
    there, or none."""
    holders: dict[tuple[int, int], set[int]] = {}
    unseen: list[tuple[int, int]] = []
    living: list[_Living] = []
    device = os.stat(FOLDER).st_dev
    for pid in processes.pids():
        with suppress(FileNotFoundError, ProcessLookupError):  # ended meanwhile
            owner, is_readable = os.stat(f"/proc/{pid}").st_uid, processes.is_readable(pid)
            if owner == os.geteuid() and _has_memory(pid):
                living.append(_living(pid))
            if not is_readable:
                if _has_memory(pid):
                    unseen.append((pid, owner))
                continue
        for key in processes.files_of(pid):
            if key[0] == device:
                holders.setdefault(key, set()).add(pid)
    return holders, unseen, living


def _living(pid: int) -> _Living:
    ticks = processes.start_ticks(pid) or 0
    started = processes.boot_time() + ticks / os.sysconf("SC_CLK_TCK")
    try:
        maps = Path(f"/proc/{pid}/maps").read_bytes()
    except PermissionError:
        maps = Path(f"/proc/{pid}/cmdline").read_bytes()
    return _Living(pid, started, maps)


def _has_memory(pid: int) -> bool:
    """Returns whether it can hold a file: neither a thread of the kernel nor a process that has
    ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(") ")[2].split()
    return fields[0] not in "ZX" and not int(fields[6]) & _KERNEL_THREAD


def _could_open(owner: int, file: Unused) -> bool:
    """By the mode of the file; root can open all."""
    if owner in (0, os.geteuid()):
        return True
    with suppress(FileNotFoundError):
        return bool(os.lstat(file.path).st_mode & 0o077)
    return False


def _hides() -> bool:
    """Returns whether /proc leaves out the processes of other users, root's among them."""
    return not os.path.exists("/proc/1")


def _is_whole() -> bool:
    """The first pid namespace shows the processes of all others."""
    with suppress(OSError):  # a kernel without namespaces, or not Linux's own
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_NAMESPACE
    return False


# The lease --------------------------------------------------------------------------------------


def _opened(file: Unused) -> int | None:
    """A descriptor of that very file; None if the name has another by now, or none."""
    try:
        opened = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    facts = os.fstat(opened)
    if (facts.st_dev, facts.st_ino) == (file.device, file.inode):
        return opened
    os.close(opened)
    return None


def _lease_on(file: Unused) -> Lease:
    """Takes a lease and gives it back at once."""
    opened = _opened(file)
    if opened is None:
        return "unknown"
    try:
        return _take_lease(opened)
    finally:
        os.close(opened)


def _take_lease(opened: int) -> Lease:
    """The lease lasts until the descriptor is closed."""
    try:
        # If a process opens the file meanwhile the kernel sends a signal; this one is ignored.
        fcntl.fcntl(opened, _F_SETSIG, signal.SIGURG)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except OSError as error:
        return "shared" if error.errno == errno.EAGAIN else "unknown"
    return "alone"


def _unlink(file: Unused) -> str | None:
    """Removes the file; returns why that failed, or None. Nobody else can open it meanwhile."""
    if os.path.isdir(file.path):
        return _remove_folder(file.path)
    opened = _opened(file)
    if opened is None:
        return _GONE
    try:
        lease = _take_lease(opened)
        is_asked_for = lease == "alone" and fcntl.fcntl(opened, fcntl.F_GETLEASE) != fcntl.F_WRLCK
        if lease == "shared" or is_asked_for:
            return reason_to_keep(Sight(lease="shared"))
        os.unlink(file.path)
    except OSError as error:
        return f"it cannot be removed: {error.strerror}"
    finally:
        os.close(opened)
    if "/" in file.name:
        with suppress(OSError):  # it has another file already
            os.rmdir(os.path.dirname(file.path))
    return None


def _remove_folder(path: str) -> str | None:
    try:
        os.rmdir(path)  # a process that starts in it right now makes it again
    except OSError as error:
        return f"it cannot be removed: {error.strerror}"
    return None
