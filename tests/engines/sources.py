"""The Python sources of the engines, fetched once by pip and kept in `build/engines`.

`python -m tests.engines.sources [RELEASE...]` fetches them before tests that have no network.
"""

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
from tempfile import TemporaryDirectory

from benchmarks.engines.environment import wheel_of

HERE = Path(__file__).parents[2] / "build/engines"
PIP = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "--retries", "1")
VLLM_WHEELS = {release: wheel_of(release) for release in [f"0.{minor}" for minor in range(24, 33)]}
WHEELS = {**VLLM_WHEELS, "0.5": ("sglang", "0.5.23")}
SOURCES = {"0.33": "0.33.0", "0.11": "0.11.2"}  # of vLLM
PACKAGES = {**dict.fromkeys([*VLLM_WHEELS, *SOURCES], "vllm"), "0.5": "sglang"}
USUAL = ("0.24", "0.32", "0.33", "0.5")  # those that `make test` needs
_refused: dict[str, str] = {}  # release and why
# The source distribution is for no platform; pip asks it for its metadata before it hands it over,
# and these answer.
BUILDERS = ("setuptools>=77,<81", "setuptools-scm>=8", "setuptools-rust", "packaging", "jinja2")


def fetch(release: str) -> None:
    """Once; what went wrong is kept for those who ask for it."""
    folder = HERE / release
    with _lock():
        if folder.exists() or release in _refused:
            return
        try:
            if release in SOURCES:
                _source(folder, SOURCES[release])
            else:
                _wheel(folder, *WHEELS[release])
        except subprocess.CalledProcessError as error:
            lines = [line for line in error.stderr.splitlines() if line.startswith("ERROR")]
            _refused[release] = (lines or ["pip failed"])[-1]


def engine(release: str) -> Path:
    """The folder that has the package, and of vLLM 0.33 its tests, too. Skips without network."""
    import pytest  # `make test` fetches while these are not yet installed

    from tests.support.missing import needs

    fetch(release)
    if release in _refused:
        pytest.skip(needs("engines' sources", _refused[release]))
    return HERE / release


def _wheel(folder: Path, distribution: str, version: str) -> None:
    with TemporaryDirectory(dir=HERE) as there:
        _pip("download", "--no-deps", "-d", there, f"{distribution}=={version}")
        (wheel,) = Path(there).iterdir()
        with zipfile.ZipFile(wheel) as archive, _whole(folder) as part:
            for name in archive.namelist():
                if name.startswith(f"{PACKAGES[folder.name]}/") and name.endswith(".py"):
                    archive.extract(name, part)


def _source(folder: Path, version: str) -> None:
    with TemporaryDirectory(dir=HERE) as there:
        builders = f"{there}/builders"
        _pip("install", "--target", builders, *BUILDERS)
        _pip(
            *("download", "--no-deps", "--no-build-isolation", "--no-binary", "vllm"),
            *("-d", there, f"vllm=={version}"),
            PYTHONPATH=builders,
            VLLM_TARGET_DEVICE="empty",
            VLLM_VERSION_OVERRIDE=version,
        )
        with tarfile.open(f"{there}/vllm-{version}.tar.gz") as archive, _whole(folder) as part:
            wanted = [
                member
                for member in archive.getmembers()
                if member.name.endswith(".py") and member.name.split("/")[1] in ("vllm", "tests")
            ]
            # Python 3.11.2 has no filters yet.
            archive.extraction_filter = getattr(tarfile, "data_filter", None)
            archive.extractall(part, wanted)
            for child in (part / f"vllm-{version}").iterdir():
                child.rename(part / child.name)


def _pip(*arguments: str | Path, **environment: str) -> None:
    subprocess.run(
        [*PIP, *map(str, arguments)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
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


if __name__ == "__main__":
    for release in sys.argv[1:] or USUAL:
        fetch(release)
    for release, why in _refused.items():
        print(f"tests of {PACKAGES[release]} {release} will be skipped: {why}", file=sys.stderr)
