"""Commands that run a role elsewhere: in another /dev/shm or PID namespace."""

import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache

import pytest

import lab


@cache
def unshare_refusal() -> str:
    """Why this machine refuses namespaces to tests; empty if it allows them."""
    if shutil.which("unshare") is None:
        return "there is no unshare command"
    probe = [*private_shm("1m")[:-1], "true"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else f"unshare is refused: {done.stderr.strip()}"


def is_sanitized(library: str = "san") -> bool:
    """Whether a sanitizer's runtime, or this one, is in every process (`tests/sanitize.sh`)."""
    return f"{library}.so" in os.environ.get("LD_PRELOAD", "")


def private_shm(size: str) -> tuple[str, ...]:
    """An interpreter with its own, empty /dev/shm of ``size`` (``64m``)."""
    mount = f'mount -t tmpfs -o size={size},mode=1777 tmpfs /dev/shm && exec "$@"'
    return ("unshare", "-rm", "sh", "-c", mount, "sh", sys.executable)


def own_pid_namespace() -> tuple[str, ...]:
    """An interpreter that is process 1 of a PID namespace and shares everything else."""
    return ("unshare", "-r", "-p", "-f", "--mount-proc", "--kill-child", sys.executable)


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
    """Why this machine refuses networks to tests; empty if it allows them."""
    return lab.refusal()
