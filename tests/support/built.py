"""The programs that were built before the tests: no test compiles."""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

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
