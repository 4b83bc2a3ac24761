"""The machine that figures were measured on, and how busy it was."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def describe() -> str:
    """One line: processor, cores, kernel, interpreter, load."""
    cpu = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    return (
        f"{cpu}, {cores} cores, Linux {platform.release()}, "
        f"CPython {platform.python_version()}, load {load:.1f}"
    )
