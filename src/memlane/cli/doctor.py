"""`memlane doctor`: what on this machine will cause trouble, and how to fix it.

Standard library only: it also runs where the extra of the command line is missing. `look` reads
the facts; `judge` says what follows from them, for any machine.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import importlib.metadata
import json
import mmap
import os
import platform
import re
import resource
import shutil
import string
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from memlane.engines.sglang._engine import SGLANG
from memlane.engines.vllm._engine import VLLM
from memlane.inspect import layout

_FOLDER = "/dev/shm"
_MIB, _GIB = 1 << 20, 1 << 30
_SMALL_SHM = 1 * _GIB  # vLLM's rings alone are 160 MB each, its object store 4 GiB
_FEW_FILES = 1024
_UNLIMITED = 1 << 60
_MADV_POPULATE_WRITE = 23
_FUTEX_WAITV = 449
_IO_URING_SETUP = 425
_CAP_SYS_PTRACE = 19
_PACKAGES = ("memlane", "numpy", "pyzmq", "msgspec", "torch", "vllm", "sglang", "ray")
_EXTRA = ("typer", "rich", "py-spy")

USAGE = "usage: memlane doctor [--json]"

Level = Literal["ok", "note", "hurts"]


@dataclass(frozen=True)
class Finding:
    """One thing about the machine.

    Attributes:
        topic: what it is about.
        level: `hurts` if something will fail or be slow because of it, else `note` or `ok`.
        text: what was found, and what follows.
        cure: the command or setting that changes it; empty if there is nothing to cure.
    """

    topic: str
    level: Level
    text: str
    cure: str = ""


@dataclass(frozen=True)
class Machine:
    """Facts, in bytes; None where they cannot be known here.

    Attributes:
        shm_total, shm_free: of /dev/shm; None if there is none.
        shm_type: the kind of its file system, as mount(8) names it.
        shm_read_only: whether it is mounted so that nobody may write.
        shm_writable: whether this user may create files in it.
        shm_listed: whether this user may list it, which sweeps of dead segments need.
        tmpfile: whether files can be created there without a name (O_TMPFILE).
        memory_limit: of the cgroup, to which pages of /dev/shm count; None without a limit.
        memlock: limit of pinned memory; None without a limit.
        file_size: limit of a file's size, also in /dev/shm; None without a limit.
        files: limit of open descriptors.
        populate_write, futex_waitv, io_uring, pidfd_open: whether the kernel allows it.
        pagemap: whether /proc/self/pagemap can be read.
        shmem_huge: setting of transparent huge pages for /dev/shm.
        huge_free: bytes of free huge pages.
        nodes: NUMA nodes.
        can_trace: whether py-spy may read other processes of this user.
        yama: kernel.yama.ptrace_scope.
        proc: whether /proc is mounted.
        proc_hidden: whether /proc hides other users' processes (hidepid).
        own_pids: whether this is a pid namespace of its own, as in a container.
        cuda: whether a driver of NVIDIA is there.
        versions: of packages, by name.
        releases: version of each engine that is installed, and whether memlane is tested with it.
    """

    shm_total: int | None
    shm_free: int | None
    shm_type: str | None
    shm_read_only: bool
    shm_writable: bool
    shm_listed: bool
    tmpfile: bool
    memory_limit: int | None
    memlock: int | None
    file_size: int | None
    files: int
    populate_write: bool
    futex_waitv: bool | None
    io_uring: bool | None
    pidfd_open: bool
    pagemap: bool
    shmem_huge: str | None
    huge_free: int | None
    nodes: int
    can_trace: bool
    yama: int | None
    proc: bool
    proc_hidden: bool
    own_pids: bool
    cuda: bool
    versions: Mapping[str, str] = field(default_factory=dict)
    releases: Mapping[str, tuple[str, bool]] = field(default_factory=dict)

    @property
    def shm_usable(self) -> bool:
        """True if this user may create files in /dev/shm; if not, only that is worth a finding."""
        return self.shm_total is not None and not self.shm_read_only and self.shm_writable

    @property
    def lacking(self) -> str:
        """The optional system calls that are not allowed."""
        calls = {"futex_waitv": self.futex_waitv, "io_uring": self.io_uring}
        return " and ".join(name for name, is_there in calls.items() if is_there is False)

    @property
    def missing(self) -> str:
        """The packages of the command line that are not installed."""
        return ", ".join(name for name in _EXTRA if name not in self.versions)

    @property
    def yama_scope(self) -> str:
        return "" if self.yama is None else f" (kernel.yama.ptrace_scope is {self.yama})"

    @property
    def huge_pages(self) -> str:
        free = f"; {_size(self.huge_free)} of huge pages are free" if self.huge_free else ""
        return f"transparent huge pages for {_FOLDER}: {self.shmem_huge or 'unknown'}{free}"


class Rule(NamedTuple):
    """A finding, if `test` holds. The text names facts of the machine, `m`, in braces."""

    level: Level
    topic: str
    test: Callable[[Machine], object]
    text: str
    cure: str = ""


def _always(_: Machine) -> bool:
    return True


# What follows from the facts: of each topic the first rule that holds, if any does.
# fmt: off
_RULES = [Rule(*row) for row in (
    ("hurts", "/dev/shm", lambda m: m.shm_total is None,
     "is missing", "mount -t tmpfs tmpfs /dev/shm"),
    ("hurts", "/dev/shm", lambda m: m.shm_read_only,
     "is mounted read-only, so no segment can be created",
     "mount -o remount,rw /dev/shm; docker run --tmpfs /dev/shm with --read-only"),
    ("hurts", "/dev/shm", lambda m: not m.shm_writable,
     "this user may not create files in it, so no segment can be created",
     "chmod 1777 /dev/shm, as root"),
    ("hurts", "/dev/shm", lambda m: m.shm_type not in ("tmpfs", None),
     "is on a disk or another file system ({m.shm_type}), not in memory (tmpfs): slow, and "
     "messages are written to it",
     "mount -t tmpfs tmpfs /dev/shm"),
    ("hurts", "/dev/shm", lambda m: m.shm_total < _SMALL_SHM,
     "{m.shm_total:size}, {m.shm_free:size} free: too small for the queues of an engine",
     "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm"),
    ("hurts", "/dev/shm", lambda m: m.shm_free < m.shm_total // 20,
     "{m.shm_total:size}, {m.shm_free:size} free: nearly full", "memlane ls; memlane clean"),
    ("ok", "/dev/shm", _always, "{m.shm_total:size}, {m.shm_free:size} free"),

    ("ok", "leftovers", lambda m: m.shm_listed,
     "/dev/shm can be listed, so dead segments are removed"),
    ("hurts", "leftovers", lambda m: m.shm_usable,
     "/dev/shm cannot be listed, so what dead processes leave stays", "chmod 1777 /dev/shm"),

    ("ok", "O_TMPFILE", lambda m: m.tmpfile, "segments have no name until they are complete"),
    ("hurts", "O_TMPFILE", lambda m: m.shm_usable,
     "/dev/shm creates no files without a name, so no segment can be created",
     "df -i /dev/shm; mount -t tmpfs tmpfs /dev/shm if it is another file system"),

    ("hurts", "file size", lambda m: m.file_size is not None and m.file_size < _SMALL_SHM,
     "no file may have more than {m.file_size:size}, in /dev/shm too: segments are refused",
     "ulimit -f unlimited"),
    ("note", "file size", lambda m: m.file_size is not None,
     "no file may have more than {m.file_size:size}, in /dev/shm too", "ulimit -f unlimited"),
    ("ok", "file size", _always, "no limit"),

    ("ok", "memory limit", lambda m: m.memory_limit is None, "none"),
    ("note", "memory limit", lambda m: m.memory_limit <= (m.shm_total or 0),
     "{m.memory_limit:size} of the cgroup, which pages of /dev/shm count against: it ends before "
     "/dev/shm is full, and the kernel then kills a process",
     "raise the container's memory limit, or make /dev/shm smaller"),
    ("ok", "memory limit", _always,
     "{m.memory_limit:size} of the cgroup, which pages of /dev/shm count against"),

    ("ok", "memlock", lambda m: m.memlock is None, "no limit"),
    ("note", "memlock", lambda m: m.cuda,
     "{m.memlock:size} may be locked; CUDA's own pinning does not count"),
    ("ok", "memlock", _always, "{m.memlock:size} may be locked"),

    ("note", "nofile", lambda m: m.files <= _FEW_FILES,
     "{m.files} open files: a queue needs 2 to 8 each", "ulimit -n 65536"),
    ("ok", "nofile", _always, "{m.files} open files"),

    ("ok", "MADV_POPULATE_WRITE", lambda m: m.populate_write,
     "pages of regions are made in parallel"),
    ("note", "MADV_POPULATE_WRITE", _always,
     "the kernel lacks it (5.14 has it): regions start by touching each page"),

    ("ok", "pagemap", lambda m: m.pagemap, "large arrays are lent, not copied twice"),
    ("note", "pagemap", _always, "/proc/self/pagemap cannot be read: large arrays are copied"),

    ("ok", "pidfd_open", lambda m: m.pidfd_open, "ends of other processes are noticed at once"),
    ("note", "pidfd_open", _always,
     "not allowed here: a death is noticed within a second, not at once; and `memlane export "
     "--ends-with`, Mooncake's tier and memlane.testing need it",
     "allow it in the seccomp profile; newer container runtimes do"),

    ("ok", "system calls", lambda m: not m.lacking, "futex_waitv and io_uring are allowed"),
    ("note", "system calls", _always,
     "{m.lacking} not allowed here; memlane does not need it today"),

    ("note", "huge pages", lambda m: m.shmem_huge == "deny",
     "{m.huge_pages}; regions of many GiB then start and copy more slowly",
     "echo never > /sys/kernel/mm/transparent_hugepage/shmem_enabled: regions then ask for theirs"),
    ("ok", "huge pages", _always, "{m.huge_pages}"),

    ("ok", "NUMA", lambda m: m.nodes <= 1, "one node"),
    ("note", "NUMA", _always, "{m.nodes} nodes: pages lie where they are first written",
     "numactl --cpunodebind=N for a worker and its GPU"),

    ("ok", "ptrace", lambda m: m.can_trace, "py-spy may read stacks of other processes"),
    ("note", "ptrace", _always,
     "`memlane stuck` shows no stacks: py-spy may not read other processes{m.yama_scope}",
     "run it as root, or with --cap-add SYS_PTRACE"),

    ("hurts", "/proc", lambda m: not m.proc,
     "is not mounted, so no segment can be created or looked at", "mount -t proc proc /proc"),
    ("note", "/proc", lambda m: m.proc_hidden,
     "hides other users' processes, so their files cannot be told"),
    ("note", "/proc", lambda m: m.own_pids, "shows this container's processes only"),
    ("ok", "/proc", _always, "shows all processes"),

    ("ok", "CUDA", lambda m: m.cuda, "a driver is there"),
    ("ok", "CUDA", _always, "no driver is there"),

    ("ok", "command line", lambda m: not m.missing, "complete"),
    ("note", "command line", _always, "{m.missing} not installed",
     "run: pip install '.[cli]' in memlane's checkout"),
)]
# fmt: on


class _Text(string.Formatter):
    """Texts of rules; `size` formats bytes."""

    def format_field(self, value: Any, format_spec: str) -> str:
        return _size(value) if format_spec == "size" else str(value)


def judge(machine: Machine) -> list[Finding]:
    """Returns the findings that follow from the facts, always in the same order."""
    found: dict[str, Finding] = {}
    for level, topic, test, text, cure in _RULES:
        if topic not in found and test(machine):
            found[topic] = Finding(topic, level, _Text().format(text, m=machine), cure)
    return [*found.values(), *_engines(machine)]


def _engines(machine: Machine) -> Iterator[Finding]:
    for name, (version, is_tested) in machine.releases.items():
        if is_tested:
            yield Finding(name, "ok", f"{version} is tested: MEMLANE_{name.upper()} works")
        else:
            text = f"{version} is not tested with memlane: MEMLANE_{name.upper()} changes nothing"
            yield Finding(name, "note", text)


def _size(count: int) -> str:
    if count >= _GIB:
        return f"{count / _GIB:.1f} GiB"
    return f"{count / _MIB:.0f} MiB"


# Facts ------------------------------------------------------------------------------------------


def look() -> Machine:
    """The facts of this machine, as this process sees them."""
    total, free, is_read_only = None, None, False
    with suppress(OSError):
        facts = os.statvfs(_FOLDER)
        total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
        is_read_only = bool(facts.f_flag & os.ST_RDONLY)
    yama = _number("/proc/sys/kernel/yama/ptrace_scope")
    return Machine(
        shm_total=total,
        shm_free=free,
        shm_type=None if total is None else _type_of(_FOLDER),
        shm_read_only=is_read_only,
        shm_writable=os.access(_FOLDER, os.W_OK | os.X_OK),
        shm_listed=os.access(_FOLDER, os.R_OK | os.X_OK),
        tmpfile=_creates_unnamed(),
        memory_limit=_memory_limit(),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        file_size=_limit(resource.RLIMIT_FSIZE),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        populate_write=_populates(),
        futex_waitv=_is_allowed(_FUTEX_WAITV),
        io_uring=_is_allowed(_IO_URING_SETUP),
        pidfd_open=_opens_pidfds(),
        pagemap=os.access("/proc/self/pagemap", os.R_OK),
        shmem_huge=_chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        huge_free=_huge_free(),
        nodes=len(glob.glob("/sys/devices/system/node/node[0-9]*")) or 1,
        can_trace=os.geteuid() == 0 or yama in (0, None) or _has_capability(_CAP_SYS_PTRACE),
        yama=yama,
        proc=os.path.exists("/proc/self/fd"),
        proc_hidden=_is_proc_hidden(),
        own_pids=_has_own_pids(),
        cuda=bool(glob.glob("/dev/nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None,
        versions=versions(),
        releases=_releases(),
    )


def _creates_unnamed() -> bool:
    try:
        os.close(os.open(_FOLDER, os.O_TMPFILE | os.O_RDWR, 0o600))
    except OSError:
        return False
    return True


def _type_of(folder: str) -> str | None:
    """The kind of the file system that was mounted last on the folder, or on one around it."""
    path = Path(os.path.realpath(folder))
    found: tuple[int, str | None] = (0, None)
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
            fields, _, source = line.partition(" - ")
            place = Path(
                re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields.split()[4])
            )
            if path.is_relative_to(place) and len(place.parts) >= found[0]:
                found = len(place.parts), source.split()[0]
    return found[1]


def _limit(name: int) -> int | None:
    """A limit of this process; None without one."""
    limit = resource.getrlimit(name)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _opens_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def _memory_limit() -> int | None:
    """The smallest of this cgroup and those around it that can be seen."""
    limits = []
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            number, _, path = line.split(":", 2)
            controller = "memory" if number != "0" else ""
            if number != "0" and "memory" not in line.split(":")[1].split(","):
                continue
            name = "memory.limit_in_bytes" if controller else "memory.max"
            for folder in (Path(path), *Path(path).parents):
                limits.append(_number(f"/sys/fs/cgroup/{controller}{folder}/{name}"))
    known = [limit for limit in limits if limit is not None and limit < _UNLIMITED]
    return min(known, default=None)


def _populates() -> bool:
    """Returns whether the kernel knows MADV_POPULATE_WRITE."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def _is_allowed(number: int) -> bool | None:
    """Returns whether a system call exists and no filter refuses it: called with arguments that are
    wrong in any case."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, 0, 0, 0, 0, 0) >= 0:
        return True
    return ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM)


def _huge_free() -> int | None:
    size, count = None, None
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "HugePages_Free":
                count = int(rest)
            elif name == "Hugepagesize":
                size = int(rest.split()[0]) * 1024
    return None if size is None or count is None else size * count


def _number(path: str) -> int | None:
    with suppress(OSError, ValueError):
        return int(Path(path).read_text())
    return None


def _chosen(path: str) -> str | None:
    """The word in brackets."""
    with suppress(OSError, IndexError):
        return Path(path).read_text().split("[")[1].split("]")[0]
    return None


def _has_capability(number: int) -> bool:
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("CapEff:"):
                return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _is_proc_hidden() -> bool:
    with suppress(OSError):
        for line in Path("/proc/self/mounts").read_text().splitlines():
            _, folder, kind, options = line.split()[:4]
            if (folder, kind) == ("/proc", "proc"):
                hidden = [one for one in options.split(",") if one.startswith("hidepid=")]
                return bool(hidden) and hidden[0] not in ("hidepid=0", "hidepid=off")
    return False


def _has_own_pids() -> bool:
    """Returns whether this is not the first pid namespace of the machine, whose inode is fixed."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC
    return False


def versions() -> dict[str, str]:
    """The versions of Python, the kernel, and the installed packages; imports none of them."""
    found = {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "layout": str(layout.MAJOR),
    }
    for name in (*_PACKAGES, *_EXTRA):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _releases() -> dict[str, tuple[str, bool]]:
    found = {}
    for engine in (VLLM, SGLANG):
        with suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(engine.package)
            found[engine.package] = (version, engine.release_of(version) is not None)
    return found


@dataclass(frozen=True)
class Report:
    """The report of `memlane doctor`."""

    findings: list[Finding]
    versions: dict[str, str]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def report() -> Report:
    """Looks at this machine."""
    machine = look()
    return Report(judge(machine), {**machine.versions, "executable": sys.executable})


# Printing ---------------------------------------------------------------------------------------


def lines(findings: Sequence[Finding]) -> list[str]:
    """Returns the lines of all findings, the worst first, each with its remedy."""
    order = {"hurts": 0, "note": 1, "ok": 2}
    made = []
    for finding in sorted(findings, key=lambda finding: order[finding.level]):
        made.append(f"{finding.level:<5} {finding.topic}: {finding.text}")
        if finding.cure:
            made.append(f"      {finding.cure}")
    return made


def exit_code(findings: Sequence[Finding]) -> int:
    return int(any(finding.level == "hurts" for finding in findings))


def run(arguments: Sequence[str]) -> int:
    """Prints the report; returns the exit code."""
    if [*arguments] not in ([], ["--json"]):
        print(USAGE)
        return 0 if "--help" in arguments else 2
    found = report()
    if arguments:
        print(json.dumps(found.as_json(), indent=2))
    else:
        versions = ", ".join(f"{name} {text}" for name, text in found.versions.items())
        for line in [*lines(found.findings), f"ok    versions: {versions}"]:
            print(_wrapped(line))
    return exit_code(found.findings)


def _wrapped(line: str) -> str:
    """On a terminal, between words; a cure is one line, to be copied."""
    if not sys.stdout.isatty() or line.startswith("      "):
        return line
    width = shutil.get_terminal_size().columns
    return textwrap.fill(line, width, subsequent_indent=" " * 6, break_on_hyphens=False)
