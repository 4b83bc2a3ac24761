"""The resources of a process, to show that a test left nothing behind."""

import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SHM = Path("/dev/shm")
LASTING: set[int] = set()  # processes that serve several tests, and are no leak of one
_IN_SHM = f" {SHM}/"
_LASTING_THREADS = {"tokio-rt-worker"}  # of obstore: once started, they never end


@dataclass(frozen=True)
class Holdings:
    """A snapshot of everything that could leak."""

    segments: Counter[str]
    descriptors: Counter[str]
    mappings: Counter[str]
    threads: Counter[str]
    children: Counter[str]


def children_of(pid: int) -> list[int]:
    """The processes whose parent is ``pid``, including zombies, but for ``LASTING`` ones."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return [pid for pid in found if pid not in LASTING]


def holdings(prefix: str | tuple[str, ...]) -> Holdings:
    """Returns what this process holds now, and the files in /dev/shm whose names start with
    ``prefix``."""
    return Holdings(
        segments=Counter(name for name in os.listdir(SHM) if name.startswith(prefix)),
        descriptors=Counter(_descriptors()),
        mappings=Counter(_mappings()),
        threads=Counter(_threads()),
        children=Counter(f"{pid} ({_command(pid)})" for pid in children_of(os.getpid())),
    )


def surplus(before: Holdings, after: Holdings) -> list[str]:
    """Returns what ``after`` has and ``before`` does not, one line each."""
    lines = []
    for kind in ("segments", "descriptors", "mappings", "threads", "children"):
        more = getattr(after, kind) - getattr(before, kind)
        lines += [f"{kind}: {what}" for what in more.elements()]
    return lines


def _descriptors() -> list[str]:
    targets = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:  # the one that listed the directory
            continue
    return targets


def _threads() -> list[str]:
    found = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            name = Path(f"/proc/self/task/{thread}/comm").read_text().strip()
            if name not in _LASTING_THREADS:
                found.append(thread)
    return found


def _mappings() -> list[str]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line.split(maxsplit=5)[5] for line in lines if _IN_SHM in line]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return "gone"
