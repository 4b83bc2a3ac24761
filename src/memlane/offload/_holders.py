"""Finds processes that have a file open or mapped, as far as /proc shows; for error texts only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress


def holders_of(path: str) -> str:
    """Their pids and commands as text; empty if there are none that this process can see.

    Processes of other users, and those in other pid namespaces, cannot be seen.
    """
    try:
        file = os.stat(path)
    except OSError:
        return ""
    key = (file.st_dev, file.st_ino)
    pids = sorted(int(name) for name in os.listdir("/proc") if name.isdecimal())
    return ", ".join(f"pid {pid} ({_command(pid)})" for pid in pids if key in _files_of(pid))


def _files_of(pid: int) -> Iterator[tuple[int, int]]:
    """Device and inode of each file that is open or mapped; skips what is gone or unreadable."""
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                file = entry.stat()
                yield file.st_dev, file.st_ino
    with suppress(OSError), open(f"/proc/{pid}/maps", "rb") as maps:
        for line in maps:
            device, inode = line.split(None, 5)[3:5]
            major, minor = (int(number, 16) for number in device.split(b":"))
            yield os.makedev(major, minor), int(inode)


def _command(pid: int) -> str:
    with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as text:
        return os.fsdecode(text.read(200)).replace("\0", " ").strip()
    return "?"
