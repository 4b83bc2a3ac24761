"""The programs that were built before the tests: no test compiles."""

import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path

import pytest

from tests.support.failing_calls import preloading
from tests.support.places import private_shm, unshare_refusal

BUILD = Path(__file__).parents[2] / "build"


def built(file: str, target: str) -> Path:
    """The file `build/FILE`. Fails if it is not there, or older than the sources."""
    path = BUILD / file
    lacks = _outdated(file.partition("/")[0]) if path.exists() else f"there is no {path}"
    if lacks:
        pytest.fail(f"{lacks}: run `make {target}`, then the tests", pytrace=False)
    return path


@cache
def _outdated(folder: str) -> str:
    ninja = shutil.which("ninja", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if ninja is None:
        return ""  # who has built it had one: a machine that only runs the tests cannot tell
    dry_run = [ninja, "-C", str(BUILD / folder), "-n"]
    said = subprocess.run(dry_run, capture_output=True, text=True, check=True).stdout
    return "" if "no work to do" in said else f"build/{folder} is older than the native code"


@cache
def hooked() -> tuple[str, ...]:
    """An interpreter with the extension that has hooks, in its own /dev/shm if that is allowed.

    With -S, because the finder of an editable installation goes before every path.
    """
    site = built(f"hooks/site/memlane/_native{sysconfig.get_config_var('EXT_SUFFIX')}", "hooks")
    paths = f"{site.parents[1]}:{sysconfig.get_path('purelib')}"
    python = (sys.executable,) if unshare_refusal() else private_shm("256m")
    return ("env", f"PYTHONPATH={paths}", *python, "-S")


def preloaded() -> tuple[str, ...]:
    """Such an interpreter whose system calls can fail."""
    command = hooked()
    return (*preloading(BUILD / "hooks/libfailing_calls.so"), *command)
