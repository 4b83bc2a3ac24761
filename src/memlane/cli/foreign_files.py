"""What engines leave in /dev/shm that is not memlane's: files that no process uses any more.

These files have no locks, so a file is unused only if every process that could hold it can be seen,
and none has it open or mapped. Files are told apart by device and inode, not by name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch

from memlane.inspect import processes
from memlane.inspect.segment import FOLDER

PATTERNS = (
    "psm_*",
    "vllm_offload_*",
    "VLLM_OBJECT_STORAGE_SHM_BUFFER*",
    "vllm_mm_*",
    "vllm_ec_*",
    "sgl_shm_*",
    "multi_tokenizer_args_*",
    "sglang_loads_*",
    "nccl-*",
)
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # its inode, which is fixed

Identity = tuple[int, int]  # device, inode


@dataclass(frozen=True)
class Unused:
    """A file that no process has open or mapped. `bytes`: of /dev/shm that it takes."""

    name: str
    bytes: int
    device: int
    inode: int


@dataclass(frozen=True)
class Kept:
    """A file that may be in use, and why."""

    name: str
    reason: str


def unused() -> tuple[list[Unused], list[Kept]]:
    """This user's files of engines in /dev/shm: those that nobody uses, and those that stay."""
    candidates = list(_candidates())
    if not candidates:
        return [], []
    held, blind = _held()
    free, kept = [], []
    for one in candidates:
        holders = held.get((one.device, one.inode))
        if holders:
            pids = ", ".join(map(str, sorted(holders)))
            kept.append(Kept(one.name, f"in use by pid {pids}"))
        elif blind:
            kept.append(Kept(one.name, blind))
        else:
            free.append(one)
    return free, kept


def remove(files: Iterable[Unused]) -> list[str]:
    """Unlinks those that are still the same file, and still unused; returns their names."""
    held, blind = _held()
    removed = []
    for one in files:
        with suppress(OSError):  # gone meanwhile
            path = f"{FOLDER}/{one.name}"
            facts = os.lstat(path)
            identity = (facts.st_dev, facts.st_ino)
            if identity == (one.device, one.inode) and identity not in held and not blind:
                os.unlink(path)
                removed.append(one.name)
    return removed


def _candidates() -> Iterator[Unused]:
    with suppress(OSError), os.scandir(FOLDER) as entries:
        for entry in entries:
            if not any(fnmatch(entry.name, pattern) for pattern in PATTERNS):
                continue
            with suppress(OSError):  # removed meanwhile
                facts = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid():
                    yield Unused(entry.name, facts.st_blocks * 512, facts.st_dev, facts.st_ino)


def _held() -> tuple[dict[Identity, set[int]], str]:
    """Who holds which file; and why others might that cannot be seen, or nothing."""
    held: dict[Identity, set[int]] = {}
    blind = ""
    with suppress(OSError):
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
            blind = "processes outside this container cannot be seen, and may use it"
    for pid in processes.pids():
        try:
            for identity in _files_of(pid):
                held.setdefault(identity, set()).add(pid)
        except PermissionError:
            if _could_hold(pid):
                blind = f"process {pid} cannot be looked into, and may use it"
        except OSError:  # it has ended
            continue
    return held, blind


def _could_hold(pid: int) -> bool:
    """Processes of this user, and of root, may open its files. Kernel threads hold none."""
    with suppress(OSError):
        if not os.path.exists(f"/proc/{pid}/exe") and not processes.name_of(pid):
            return False
        return os.stat(f"/proc/{pid}").st_uid in (0, os.geteuid())
    return False


def _files_of(pid: int) -> Iterator[Identity]:
    with os.scandir(f"/proc/{pid}/fd") as links:
        for link in links:
            with suppress(FileNotFoundError):
                facts = link.stat()
                yield facts.st_dev, facts.st_ino
    with open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            device, inode = line.split(None, 5)[3:5]
            major, minor = (int(number, 16) for number in device.split(b":"))
            yield os.makedev(major, minor), int(inode)
