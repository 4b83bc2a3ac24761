"""Reads what /proc shows of a process: whether it lives, how it is called, which files it holds.

Everything here is about one moment: a process may end while it is looked at, which is no error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from io import FileIO
from typing import Literal

from memlane._base.descriptors import closing, is_readable_within, open_into

State = Literal["running", "stopped", "dead", "unknown"]

# How interpreters are called: options that take the next argument, those behind which a program's
# text stands, by interpreter, and names of scripts and modules.
_WITH_VALUE = ("-X", "-W", "--check-hash-based-pycs", "-r", "--require")
_CODE = {"python": "c", "pypy": "c", "node": "ep", "perl": "eE", "ruby": "e"}
_SCRIPT = re.compile(r"[\w.+@][\w.+@-]{0,63}")
_STARTED = "\0-c\0from multiprocessing."  # of spawn, of a fork server and its processes
_SPAWNED = ": spawned"
_MOST_ABOVE = 16  # such processes that are asked for a name, one above the other
_INTERPRETERS = ("python", "pypy", "sh", "bash", "dash", "node", "perl", "ruby")
_STATES: dict[str, State] = {"T": "stopped", "t": "stopped", "Z": "dead", "X": "dead"}


@dataclass(frozen=True)
class Holder:
    """A process that has a file open or mapped.

    Attributes:
        pid: of the process.
        path: leads to the open file, even if its name is removed: `/proc/PID/fd/N`, or
            `/proc/PID/map_files/RANGE` of a file that is only mapped, which only root may follow.
        is_open: whether a descriptor is open.
        mapped: device and inode of the mapped file of this name; None if there is none.
    """

    pid: int
    path: str
    is_open: bool
    mapped: tuple[int, int] | None


def pids() -> list[int]:
    """All processes of this pid namespace, ascending. Empty without /proc."""
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return sorted(int(name) for name in names if name.isdecimal())


def is_readable(pid: int) -> bool:
    """Returns whether this user may see which files the process holds."""
    return os.access(f"/proc/{pid}/fd", os.R_OK | os.X_OK) and os.access(
        f"/proc/{pid}/maps", os.R_OK
    )


def status(pid: int) -> tuple[State, int | None]:
    """The process's state, `unknown` if /proc may not be read; and when it was started, in clock
    ticks since boot, or None."""
    try:
        stat = _read(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return "dead", None
    except OSError:
        return "unknown", None
    fields = stat.rpartition(b") ")[2].split()
    return _STATES.get(fields[0].decode(), "running"), int(fields[19])


def state(pid: int) -> State:
    return status(pid)[0]


@dataclass(frozen=True)
class Condition:
    """The state of a living process, as far as /proc shows it.

    Attributes:
        state: `traced` and `frozen` are ways of being stopped that SIGCONT does not end.
        words: the same in words, with where its main thread sleeps.
        sleeps_in: the function of the kernel in which that thread sleeps; empty if it does not, or
            this user may not know.
        is_in_state_d: that thread waits for a device, and no signal reaches it.
    """

    state: Literal["running", "stopped", "traced", "frozen"]
    words: str
    sleeps_in: str = ""
    is_in_state_d: bool = False


def condition(pid: int, started: int) -> Condition | None:
    """Returns the state of the process that was started at that tick; None if /proc does not show
    it."""
    try:
        stat = _read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
        if int(stat[19]) != started:
            return None
        where = _sleeps_in(pid)
    except OSError:
        return None
    letter = stat[0].decode()
    if where in _FROZEN or _is_frozen(pid):
        return Condition("frozen", "frozen by its cgroup")
    if letter in "Tt" and (tracer := _tracer(pid)):
        return Condition("traced", f"stopped by a tracer (pid {tracer})")
    match letter:
        case "T" | "t":
            return Condition("stopped", "stopped")
        case "R":
            return Condition("running", "running on a core")
        case "Z":
            return Condition("running", "running, but its main thread has ended")
        case "D":
            words = f"running, its main thread in state D ({where})"
            return Condition("running", words, where, is_in_state_d=True)
    if not where:
        return Condition("running", "running")
    words = f"running, its main thread asleep in the kernel ({where})"
    return Condition("running", words, where)


_FROZEN = ("do_freezer_trap", "__refrigerator")  # where frozen threads are
_CGROUPS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")  # alone, or beside the first version


def _sleeps_in(pid: int) -> str:
    with suppress(PermissionError):
        where = _read(f"/proc/{pid}/wchan").decode()
        return "" if where == "0" else where
    return ""


def _is_frozen(pid: int) -> bool:
    """Returns whether the process's cgroup, or one above it, is frozen; needs no right to see
    wchan."""
    with suppress(OSError):
        for line in _read(f"/proc/{pid}/cgroup").decode(errors="surrogateescape").splitlines():
            if line.startswith("0::/"):
                for root in _CGROUPS:
                    with suppress(OSError):
                        return b"frozen 1" in _read(f"{root}{line[3:]}/cgroup.events")
    return False


def _tracer(pid: int) -> int:
    with suppress(OSError):
        return int(_read(f"/proc/{pid}/status").partition(b"TracerPid:")[2].split()[0])
    return 0


def descends_from(pid: int, ancestor: int) -> bool:
    """Returns whether the process is `ancestor`, or a child of it, or a child's child, and so on,
    as long as those between them live."""
    while pid not in (0, ancestor):
        try:
            pid = _parent_of(pid)
        except OSError:
            return False
    return pid == ancestor


def parents() -> dict[int, int]:
    """The parent of each process of this pid namespace."""
    found = {}
    for pid in pids():
        with suppress(OSError):  # it has ended
            found[pid] = _parent_of(pid)
    return found


def cpu_seconds(pid: int) -> float:
    """The processor time that all its threads have used; 0 if it has ended."""
    with suppress(OSError):
        fields = _read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def program_of(pid: int) -> str | None:
    """The path of the program that it runs; None if this user may not know, or it has ended."""
    with suppress(OSError):
        return os.readlink(f"/proc/{pid}/exe")
    return None


def sleeps_until_a_time(pid: int, thread: int) -> bool:
    """Returns whether that thread is in a sleep of so many seconds, as far as this user may
    know."""
    with suppress(OSError):
        return b"nanosleep" in _read(f"/proc/{pid}/task/{thread}/wchan")
    return False


def is_stopped(pid: int) -> bool:
    """Returns whether all of the process's threads have stopped."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return all(state(int(thread)) == "stopped" for thread in threads)


def start_ticks(pid: int) -> int | None:
    """Returns when the process was started, in clock ticks since boot; None if it has ended."""
    return status(pid)[1]


def _read(path: str) -> bytes:
    """The start of a small file, without the layers of `open`. A signal handler that raises leaves
    no descriptor open."""
    with FileIO(path) as file:
        return file.read(4096) or b""


@cache
def boot_time() -> float:
    """Returns when this machine was started, in seconds since 1970."""
    with suppress(OSError, ValueError), open("/proc/stat") as lines:
        for line in lines:
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0


def name_of(pid: int) -> str:
    """A title that the process gave itself, or its program, and script or module if it is an
    interpreter: never its arguments, where keys may stand. Empty if it has ended. One that
    multiprocessing has started anew has its parent's, and that it was spawned; an orphan of another
    program has its own."""
    with suppress(OSError):
        spawned = ""
        for _ in range(_MOST_ABOVE):
            line = _read(f"/proc/{pid}/cmdline").decode(errors="replace")
            if _STARTED not in line or _program_of(parent := _parent_of(pid)) != _program_of(pid):
                break
            pid, spawned = parent, _SPAWNED
        if line:
            return _name_in(line) + spawned
        return _read(f"/proc/{pid}/comm").decode(errors="replace").strip() + spawned
    return ""


def _program_of(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/exe")


def _parent_of(pid: int) -> int:
    return int(_read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()[1])


def _name_in(line: str) -> str:
    """
    >>> _name_in("/usr/bin/python3.11\\0-u\\0serve.py\\0--key=secret\\0")
    'python3.11 serve.py'
    >>> _name_in("VLLM::Worker_TP1\\0\\0\\0")
    'VLLM::Worker_TP1'
    >>> _name_in("python\\0-Ic\\0key='secret'\\0"), _name_in("python3\\0-\\0--key\\0secret\\0")
    ('python -c', 'python3')
    >>> _name_in("bash\\0-lc\\0TOKEN=secret serve\\0"), _name_in("perl\\0-e\\0$key='secret'\\0")
    ('bash -c', 'perl -e')
    >>> _name_in("python\\0-um\\0engine.serve\\0secret\\0"), _name_in("sh\\0-e\\0run.sh\\0")
    ('python -m engine.serve', 'sh run.sh')
    """
    arguments = line.rstrip("\0").split("\0")
    if len(arguments) == 1:
        # A title that was set over the arguments, as setproctitle does; its first word only if
        # it looks like a command line.
        title = arguments[0]
        return os.path.basename(title.split()[0]) if title.startswith(("/", "-")) else title[:64]
    program = os.path.basename(arguments[0])
    if not program.startswith(_INTERPRETERS):
        return program
    rest = iter(arguments[1:])
    kind = program.rstrip("0123456789.")
    code = _CODE.get(kind, "c")
    for argument in rest:
        if argument in _WITH_VALUE:
            next(rest, None)
        elif argument == "-" or argument.startswith(("--eval", "--print")):
            break
        elif not argument.startswith("-"):
            script = os.path.basename(argument)
            return f"{program} {script}" if _SCRIPT.fullmatch(script) else program
        elif argument.startswith("--"):
            continue
        elif argument.endswith("m") and kind in ("python", "pypy"):
            module = next(rest, "")
            return f"{program} -m {module}" if _SCRIPT.fullmatch(module) else program
        elif found := next((letter for letter in argument[1:] if letter in code), None):
            return f"{program} -{found}"  # not what follows: keys may stand in it
    return program


def files_of(pid: int) -> Iterator[tuple[int, int]]:
    """(device, inode) of each open or mapped file of a process, as far as this user may see it."""
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as links:
        for link in links:
            with suppress(OSError):  # closed meanwhile
                file = link.stat()
                yield file.st_dev, file.st_ino
    with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as lines:
        for line in lines:
            device, inode = line.split(None, 5)[3:5]
            major, minor = (int(number, 16) for number in device.split(":"))
            yield os.makedev(major, minor), int(inode)


def holders_of(path: str) -> str:
    """Pids and names of those that have the file open or mapped, for an error's text; empty if this
    process sees none: those of other users and other pid namespaces it cannot see."""
    try:
        file = os.stat(path)
    except OSError:
        return ""
    key = (file.st_dev, file.st_ino)
    holders = [pid for pid in pids() if key in files_of(pid)]
    return ", ".join(f"pid {pid} ({name_of(pid)})" for pid in holders)


def holders_in(folder: str, of: Iterable[int] | None = None) -> Iterator[tuple[str, Holder]]:
    """(path as the kernel has it, holder) of each file of `folder` that a process, or one of those
    in `of`, has open or mapped. A removed file's path ends in ` (deleted)`. What this user may not
    see is left out."""
    for pid in pids() if of is None else of:
        seen: set[str] = set()
        mapped = {path: (span, file) for path, span, file in _mapped(pid, folder)}
        with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as links:
            for link in links:
                with suppress(OSError):  # closed meanwhile
                    path = os.readlink(link.path)
                    if path.startswith(f"{folder}/") and path not in seen:
                        seen.add(path)
                        file = mapped[path][1] if path in mapped else None
                        yield path, Holder(pid, link.path, True, file)
        for path, (span, file) in mapped.items():
            if path not in seen:
                yield path, Holder(pid, f"/proc/{pid}/map_files/{span}", False, file)


def _mapped(pid: int, folder: str) -> Iterator[tuple[str, str, tuple[int, int]]]:
    """(path, range of addresses, device and inode) of each mapping of a file of `folder`."""
    with suppress(OSError), open(f"/proc/{pid}/maps", errors="replace") as lines:
        for line in lines:
            fields = line.rstrip("\n").split(None, 5)
            if len(fields) == 6 and fields[5].startswith(f"{folder}/"):
                major, minor = (int(number, 16) for number in fields[3].split(":"))
                yield fields[5], fields[0], (os.makedev(major, minor), int(fields[4]))


_EXITING = 0x4  # PF_EXITING of a task's flags


def is_ending(pid: int) -> bool:
    """Returns whether the process has begun to end and can execute nothing any more; it may still
    hold files and locks. False also for one that is gone."""
    try:
        fields = _read(f"/proc/{pid}/stat").rpartition(b") ")[2].split()
    except OSError:
        return False
    return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _EXITING)


def waits_for_its_end(pid: int, seconds: float) -> bool:
    """Returns whether a process that `is_ending` is over within that time, and its files closed.

    False at once where pidfd_open is refused.
    """
    opened: list[int] = []
    close = closing(opened)
    try:
        return is_readable_within(open_into(opened, os.pidfd_open, pid), seconds)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    finally:
        close()
