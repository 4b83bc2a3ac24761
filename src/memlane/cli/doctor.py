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
import resource
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
        shm_listed: whether this user may list it, which sweeps of dead segments need.
        tmpfile: whether files can be created there without a name (O_TMPFILE).
        memory_limit: of the cgroup, to which pages of /dev/shm count; None without a limit.
        memlock: limit of pinned memory; None without a limit.
        files: limit of open descriptors.
        populate_write, futex_waitv, io_uring: whether the kernel allows it.
        pagemap: whether /proc/self/pagemap can be read.
        shmem_huge: setting of transparent huge pages for /dev/shm.
        huge_free: bytes of free huge pages.
        nodes: NUMA nodes.
        can_trace: whether py-spy may read other processes of this user.
        yama: kernel.yama.ptrace_scope.
        proc_hidden: whether /proc hides other users' processes (hidepid).
        own_pids: whether this is a pid namespace of its own, as in a container.
        cuda: whether a driver of NVIDIA is there.
        versions: of packages, by name.
        releases: version of each engine that is installed, and whether memlane is tested with it.
    """

    shm_total: int | None
    shm_free: int | None
    shm_listed: bool
    tmpfile: bool
    memory_limit: int | None
    memlock: int | None
    files: int
    populate_write: bool
    futex_waitv: bool | None
    io_uring: bool | None
    pagemap: bool
    shmem_huge: str | None
    huge_free: int | None
    nodes: int
    can_trace: bool
    yama: int | None
    proc_hidden: bool
    own_pids: bool
    cuda: bool
    versions: Mapping[str, str] = field(default_factory=dict)
    releases: Mapping[str, tuple[str, bool]] = field(default_factory=dict)


def judge(machine: Machine) -> list[Finding]:
    """What follows from the facts, in an order that is always the same."""
    return [
        _space(machine),
        _listing(machine),
        _tmpfile(machine),
        _memory(machine),
        _memlock(machine),
        _files(machine),
        _populate(machine),
        _pagemap(machine),
        _kernel(machine),
        _huge(machine),
        _numa(machine),
        _tracing(machine),
        _visibility(machine),
        _cuda(machine),
        *_engines(machine),
        _extra(machine),
    ]


def _space(machine: Machine) -> Finding:
    topic = _FOLDER
    if machine.shm_total is None or machine.shm_free is None:
        return Finding(topic, "hurts", "is missing", "mount -t tmpfs tmpfs /dev/shm")
    text = f"{_text(machine.shm_total)}, {_text(machine.shm_free)} free"
    cure = "docker run --shm-size=8g, or an emptyDir of medium Memory at /dev/shm"
    if machine.shm_total < _SMALL_SHM:
        return Finding(topic, "hurts", f"{text}: too small for the queues of an engine", cure)
    if machine.shm_free < machine.shm_total // 20:
        return Finding(topic, "hurts", f"{text}: nearly full", "memlane ls; memlane clean")
    return Finding(topic, "ok", text)


def _listing(machine: Machine) -> Finding:
    if machine.shm_listed:
        return Finding("leftovers", "ok", f"{_FOLDER} can be listed, so dead segments are removed")
    return Finding(
        "leftovers",
        "hurts",
        f"{_FOLDER} cannot be listed, so what dead processes leave stays",
        "chmod 1777 /dev/shm",
    )


def _tmpfile(machine: Machine) -> Finding:
    if machine.tmpfile:
        return Finding("O_TMPFILE", "ok", "segments have no name until they are complete")
    return Finding(
        "O_TMPFILE",
        "hurts",
        f"{_FOLDER} creates no files without a name, so no segment can be created",
        "mount -t tmpfs tmpfs /dev/shm",
    )


def _memory(machine: Machine) -> Finding:
    if machine.memory_limit is None:
        return Finding("memory limit", "ok", "none")
    text = f"{_text(machine.memory_limit)} of the cgroup, which pages of {_FOLDER} count against"
    if machine.shm_total is not None and machine.memory_limit <= machine.shm_total:
        return Finding(
            "memory limit",
            "note",
            f"{text}: it ends before {_FOLDER} is full, and the kernel then kills a process",
            "raise the container's memory limit, or make /dev/shm smaller",
        )
    return Finding("memory limit", "ok", text)


def _memlock(machine: Machine) -> Finding:
    if machine.memlock is None:
        return Finding("memlock", "ok", "no limit")
    text = f"{_text(machine.memlock)} may be locked"
    if machine.cuda:
        return Finding("memlock", "note", f"{text}; CUDA's own pinning does not count", "")
    return Finding("memlock", "ok", text)


def _files(machine: Machine) -> Finding:
    text = f"{machine.files} open files"
    if machine.files <= _FEW_FILES:
        return Finding("nofile", "note", f"{text}: a queue needs 2 to 8 each", "ulimit -n 65536")
    return Finding("nofile", "ok", text)


def _populate(machine: Machine) -> Finding:
    if machine.populate_write:
        return Finding("MADV_POPULATE_WRITE", "ok", "pages of regions are made in parallel")
    return Finding(
        "MADV_POPULATE_WRITE",
        "note",
        "the kernel lacks it (5.14 has it): regions start by touching each page",
        "",
    )


def _pagemap(machine: Machine) -> Finding:
    if machine.pagemap:
        return Finding("pagemap", "ok", "large arrays are lent, not copied twice")
    return Finding(
        "pagemap", "note", "/proc/self/pagemap cannot be read: large arrays are copied", ""
    )


def _kernel(machine: Machine) -> Finding:
    lacking = [
        name
        for name, is_there in (
            ("futex_waitv", machine.futex_waitv),
            ("io_uring", machine.io_uring),
        )
        if is_there is False
    ]
    if not lacking:
        return Finding("system calls", "ok", "futex_waitv and io_uring are allowed")
    text = f"{' and '.join(lacking)} not allowed here; memlane does not need it today"
    return Finding("system calls", "note", text)


def _huge(machine: Machine) -> Finding:
    free = "" if not machine.huge_free else f"; {_text(machine.huge_free)} of huge pages are free"
    setting = machine.shmem_huge or "unknown"
    text = f"transparent huge pages for {_FOLDER}: {setting}{free}"
    if setting in ("never", "deny"):
        return Finding(
            "huge pages",
            "note",
            f"{text}; regions of many GiB then start and copy more slowly",
            "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled",
        )
    return Finding("huge pages", "ok", text)


def _numa(machine: Machine) -> Finding:
    if machine.nodes <= 1:
        return Finding("NUMA", "ok", "one node")
    return Finding(
        "NUMA",
        "note",
        f"{machine.nodes} nodes: pages lie where they are first written",
        "numactl --cpunodebind=N for a worker and its GPU",
    )


def _tracing(machine: Machine) -> Finding:
    if machine.can_trace:
        return Finding("ptrace", "ok", "py-spy may read stacks of other processes")
    scope = "" if machine.yama is None else f" (kernel.yama.ptrace_scope is {machine.yama})"
    return Finding(
        "ptrace",
        "note",
        f"`memlane stuck` shows no stacks: py-spy may not read other processes{scope}",
        "run it as root, or with --cap-add SYS_PTRACE",
    )


def _visibility(machine: Machine) -> Finding:
    if machine.proc_hidden:
        return Finding(
            "/proc", "note", "hides other users' processes, so their files cannot be told", ""
        )
    if machine.own_pids:
        return Finding("/proc", "note", "shows this container's processes only")
    return Finding("/proc", "ok", "shows all processes")


def _cuda(machine: Machine) -> Finding:
    return Finding("CUDA", "ok", "a driver is there" if machine.cuda else "no driver is there")


def _engines(machine: Machine) -> list[Finding]:
    found = []
    for name, (version, is_tested) in machine.releases.items():
        if is_tested:
            found.append(Finding(name, "ok", f"{version}: MEMLANE_{name.upper()} takes"))
        else:
            text = f"{version} is not tested with memlane: MEMLANE_{name.upper()} changes nothing"
            found.append(Finding(name, "note", text))
    return found


def _extra(machine: Machine) -> Finding:
    missing = [name for name in _EXTRA if name not in machine.versions]
    if not missing:
        return Finding("command line", "ok", "complete")
    text = f"{', '.join(missing)} not installed"
    return Finding("command line", "note", text, "pip install 'memlane[cli]'")


def _text(count: int) -> str:
    if count >= _GIB:
        return f"{count / _GIB:.1f} GiB"
    return f"{count / _MIB:.0f} MiB"


# Facts ------------------------------------------------------------------------------------------


def look() -> Machine:
    """The facts of this machine, as this process sees them."""
    total = free = None
    with suppress(OSError):
        facts = os.statvfs(_FOLDER)
        total, free = facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yama = _number("/proc/sys/kernel/yama/ptrace_scope")
    return Machine(
        shm_total=total,
        shm_free=free,
        shm_listed=os.access(_FOLDER, os.R_OK | os.X_OK),
        tmpfile=_creates_unnamed(),
        memory_limit=_memory_limit(),
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        populate_write=_populates(),
        futex_waitv=_is_allowed(_FUTEX_WAITV),
        io_uring=_is_allowed(_IO_URING_SETUP),
        pagemap=os.access("/proc/self/pagemap", os.R_OK),
        shmem_huge=_chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        huge_free=_huge_free(),
        nodes=len(glob.glob("/sys/devices/system/node/node[0-9]*")) or 1,
        can_trace=os.geteuid() == 0 or yama in (0, None) or _has_capability(_CAP_SYS_PTRACE),
        yama=yama,
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
    """Whether the kernel knows MADV_POPULATE_WRITE."""
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        try:
            memory.madvise(_MADV_POPULATE_WRITE)
        except OSError:
            return False
    return True


def _is_allowed(number: int) -> bool | None:
    """Whether a system call exists and no filter refuses it: called with arguments that are wrong
    in any case."""
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
    """Whether this is not the first pid namespace of the machine, whose inode is fixed."""
    with suppress(OSError):
        return os.stat("/proc/self/ns/pid").st_ino != 0xEFFFFFFC
    return False


def versions() -> dict[str, str]:
    """Of Python, the kernel, and the packages that are installed; imports none of them."""
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
    """What `memlane doctor` says."""

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
    """What hurts first, each with its cure."""
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
