"""Elsewhere: commands that run a role in another /dev/shm or PID namespace, and later times."""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import cache

import pytest

import lab
from tests.support.missing import needs


@cache
def unshare_refusal() -> str:
    """Returns why this machine refuses namespaces to tests; empty if it allows them."""
    if shutil.which("unshare") is None:
        return needs("namespaces", "there is no unshare command")
    probe = [*private_shm("1m")[:-1], "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else needs("namespaces", done.stderr.strip())


def is_sanitized(library: str = "san") -> bool:
    """Returns whether a sanitizer's runtime, or this one, is in every process
    (`tests/sanitize.sh`)."""
    return f"{library}.so" in os.environ.get("LD_PRELOAD", "")


class PrivateShm(tuple[str, ...]):
    """A command that mounts; a process that was forked does so by itself (`fork_server`)."""

    options = ""


def private_shm(size: str) -> PrivateShm:
    """An interpreter with its own, empty /dev/shm of ``size`` (``64m``)."""
    options = f"size={size},mode=1777"
    mount = f'mount -t tmpfs -o {options} tmpfs /dev/shm && exec "$@"'
    command = PrivateShm(("unshare", "-rm", "sh", "-c", mount, "sh", sys.executable))
    command.options = options
    return command


def own_pid_namespace() -> tuple[str, ...]:
    """An interpreter that is process 1 of a PID namespace and shares everything else."""
    return ("unshare", "-r", "-p", "-f", "--mount-proc", "--kill-child", sys.executable)


_NEW_TIME, _NEW_USER = 0x80, 0x10000000  # of unshare and setns


def pass_time(seconds: int) -> None:
    """Moves the monotonic clock of this process, which has one thread, or waits if that is refused.

    Once it has been moved, the process has no rights to other users' files, nor to its own.
    """
    libc = ctypes.CDLL(None)
    before = time.monotonic()
    if libc.unshare(_NEW_TIME | _NEW_USER) == 0:
        with suppress(OSError):
            with open("/proc/self/timens_offsets", "w") as offsets:
                offsets.write(f"monotonic {seconds} 0\n")
            with open("/proc/self/ns/time_for_children") as place:
                libc.setns(place.fileno(), _NEW_TIME)
    time.sleep(max(0.0, before + seconds - time.monotonic()))


def _imports_in_no_folder() -> bool:
    code = "import os, sys; os.chdir(sys.argv[1]); os.rmdir(sys.argv[1]); import socket"
    command = [sys.executable, "-c", code, tempfile.mkdtemp()]
    # Not to /dev/null: there are tests without /dev.
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


python_needs_no_folder = pytest.mark.skipif(
    sys.version_info[:2] == (3, 13) and not _imports_in_no_folder(),
    reason="this Python imports nothing where the working directory is gone",
)


@cache
def network_refusal() -> str:
    """Returns why this machine refuses networks to tests; empty if it allows them."""
    return lab.refusal()
