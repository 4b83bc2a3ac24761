"""The parts that all segments have in common: names, views of their memory, and whether one fits.

A full tmpfs refuses to reserve more space. A cgroup at its limit or a machine without memory does
not: the kernel kills a process instead. So both are checked before space is reserved.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from memlane._native import install
from memlane.errors import ShmExhausted

NAME_PREFIX = "memlane-"


def new_id() -> bytes:
    """128 random bits. The segment's name contains them, so names never collide."""
    return os.urandom(16)


def name_of(segment_id: bytes) -> str:
    """The name of the segment in /dev/shm."""
    return NAME_PREFIX + segment_id.hex()


class SharedMemoryInfo(NamedTuple):
    """Has the attributes of `multiprocessing.shared_memory.SharedMemory`; the size is in bytes."""

    name: str
    size: int
    buf: memoryview


@contextmanager
def released_after(view: memoryview) -> Iterator[memoryview]:
    """Releases `view` after the block. Slices that outlive it keep the memory mapped."""
    try:
        yield view
    finally:
        with suppress(BufferError):
            view.release()


# Space --------------------------------------------------------------------------------------------

_UNLIMITED = 1 << 60  # in cgroup v1, any number beyond this means "unlimited"


def check_space(directory: str, need: int, fs_free: int, root: str = "/") -> None:
    """Raises ShmExhausted if the file system, the cgroup or memory lack `need` more bytes.

    `fs_free`: free bytes in the file system of `directory`; `root`: where /proc and /sys are.
    """
    check_memory(
        need,
        root,
        (
            fs_free,
            f"{directory} has no more space; free some or make it larger (docker: --shm-size; "
            f"kubernetes: an emptyDir with medium: Memory mounted at {directory})",
        ),
    )


def check_memory(need: int, root: str = "/", *others: tuple[int, str]) -> None:
    """Raises ShmExhausted if the cgroup, memory or `others` (bytes, hint) lack `need` more bytes.

    The bindings call this for every ring and store; native code checks the file system.
    """
    if (refusal := memory_refusal(need, root, *others)) is not None:
        raise refusal


def memory_refusal(
    need: int, root: str = "/", *others: tuple[int, str], spare: int = 0
) -> ShmExhausted | None:
    """The error of `check_memory` if taking `need` bytes would leave less than `spare`, else None.

    The bindings call this for the extents of large messages.
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
    free = max(0, free - spare)
    return (
        ShmExhausted(need, free, errno.ENOSPC, f"{hint}, or ask for less") if need > free else None
    )


def memory_room(root: str = "/") -> int:
    """The machine's available memory and free swap in bytes; unlimited if /proc is not readable."""
    facts = {}
    try:
        lines = _text_of(root, "proc/meminfo").splitlines()
    except OSError:  # no /proc, or no free descriptor
        return _UNLIMITED
    for line in lines:
        name, _, amount = line.partition(":")
        facts[name] = amount
    names = ("MemAvailable", "SwapFree")
    return sum(int(facts[name].split()[0]) * 1024 for name in names if name in facts)


def cgroup_room(root: str = "/") -> tuple[int, str]:
    """Bytes left under the tightest memory limit of this process, and the cgroup that sets it.

    The group's clean file cache can be reclaimed, so it counts as free.
    """
    tightest = (_UNLIMITED, "")
    for folder, names in _groups(root):
        with suppress(OSError, ValueError, KeyError):
            limit = _text_of(folder, names["limit"]).strip()
            if limit == "max" or int(limit) >= _UNLIMITED:
                continue
            used = int(_text_of(folder, names["used"]))
            lines = _text_of(folder, "memory.stat").splitlines()
            stat = {name: int(value) for name, value in map(str.split, lines)}
            cache = stat[names["file"]] - stat.get(names["shmem"], 0)
            tightest = min(tightest, (max(0, int(limit) - used + max(0, cache)), folder))
    return tightest


_V2 = {"limit": "memory.max", "used": "memory.current", "file": "file", "shmem": "shmem"}
_V1 = {
    "limit": "memory.limit_in_bytes",
    "used": "memory.usage_in_bytes",
    "file": "total_cache",
    "shmem": "total_shmem",
}


def _groups(root: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The memory cgroup of this process and its ancestors, with the names of their files."""
    try:
        lines = _text_of(root, "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = os.path.join(root, "sys/fs/cgroup"), _V2
        elif "memory" in controllers.split(","):
            top, names = os.path.join(root, "sys/fs/cgroup/memory"), _V1
        else:
            continue
        # In a container the path may be the host's, which does not exist; its own group is the top.
        folder = os.path.join(top, path.strip("/")) if path.strip("/") else top
        while folder != top:
            yield folder, names
            folder = os.path.dirname(folder)
        yield top, names


def _text_of(*path: str) -> str:
    with open(os.path.join(*path), errors="surrogateescape") as file:
        return file.read()


install(check_memory=check_memory, memory_refusal=memory_refusal)
