"""Checks that there is memory for a segment before its space is reserved.

A full tmpfs refuses to reserve more. A cgroup at its limit or a machine without memory does not:
the kernel kills a process instead.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from memlane.errors import ShmExhausted

_UNLIMITED = 1 << 60  # in cgroup v1, any number beyond this means "unlimited"


def check_all(directory: str, need: int, fs_free: int, root: Path = Path("/")) -> None:
    """Raises ShmExhausted if the file system, the cgroup or memory lack `need` more bytes.

    `fs_free`: free bytes in the file system of `directory`; `root`: where /proc and /sys are.
    """
    check(
        need,
        root,
        (
            fs_free,
            f"{directory} has no more space; free some or make it larger (docker: --shm-size; "
            f"kubernetes: an emptyDir with medium: Memory mounted at {directory})",
        ),
    )


def check(need: int, root: Path = Path("/"), *others: tuple[int, str]) -> None:
    """Raises ShmExhausted if the cgroup, memory or `others` (bytes, hint) lack `need` more bytes.

    The bindings call this for every ring and store; native code checks the file system.
    """
    cgroup_free, group = cgroup_room(root)
    free, hint = min(
        (
            cgroup_free,
            f"the memory limit of cgroup {group}, which includes shared memory, allows no more; "
            f"raise it (docker: --memory; kubernetes: resources.limits.memory)",
        ),
        (memory_room(root), "this machine has no more memory available; end processes that use it"),
        *others,
    )
    if need > free:
        raise ShmExhausted(need, free, errno.ENOSPC, f"{hint}, or ask for less")


def memory_room(root: Path = Path("/")) -> int:
    """The machine's available memory and free swap in bytes; unlimited if /proc is not readable."""
    facts = {}
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:  # no /proc, or no free descriptor
        return _UNLIMITED
    for line in lines:
        name, _, amount = line.partition(":")
        facts[name] = amount
    names = ("MemAvailable", "SwapFree")
    return sum(int(facts[name].split()[0]) * 1024 for name in names if name in facts)


def cgroup_room(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes left under the tightest memory limit of this process, and the cgroup that sets it.

    The group's clean file cache can be reclaimed, so it counts as free.
    """
    tightest = (_UNLIMITED, "")
    for folder, names in _groups(root):
        with suppress(OSError, ValueError, KeyError):
            limit = (folder / names["limit"]).read_text().strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                continue
            used = int((folder / names["used"]).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            stat = {name: int(value) for name, value in map(str.split, lines)}
            cache = stat[names["file"]] - stat.get(names["shmem"], 0)
            tightest = min(tightest, (max(0, int(limit) - used + max(0, cache)), str(folder)))
    return tightest


_V2 = {"limit": "memory.max", "used": "memory.current", "file": "file", "shmem": "shmem"}
_V1 = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "file": "total_cache",
    "shmem": "total_shmem",
}


def _groups(root: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """The memory cgroup of this process and its ancestors, with the names of their files."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", _V2
        elif "memory" in controllers.split(","):
            top, names = root / "sys/fs/cgroup/memory", _V1
        else:
            continue
        # In a container the path may be the host's, which does not exist; its own group is the top.
        folder = top / path.lstrip("/")
        while folder != top:
            yield folder, names
            folder = folder.parent
        yield top, names
