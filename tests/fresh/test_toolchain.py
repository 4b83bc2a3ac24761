"""Without a part of the toolchain, `pip install .` says which package to install."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import nanobind
import pytest

from tests.support import PATIENCE, unshare_refusal

ROOT = Path(__file__).parents[2]
TOOLS = Path(sys.executable).parent  # cmake and ninja are in the environment, no compiler is
SYSTEM = "/usr/local/bin:/usr/bin:/bin"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that a build needs."""
    for name in ("native", "release", "src"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def run(tree: Path, path: str, *command: object) -> tuple[int, str]:
    """Exit status, and the output, unwrapped."""
    kept = {name: text for name, text in os.environ.items() if name not in ("CXX", "CC")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=tree,
        env={**kept, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=2 * PATIENCE,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())


def build(tree: Path) -> list[object]:
    """The command that builds a wheel, with what is installed already."""
    wheel = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    return [*wheel, "-w", tree / "wheels", tree]


def configure(tree: Path) -> list[object]:
    """Its first half, by cmake alone."""
    return [
        TOOLS / "cmake",
        *("-S", tree, "-B", tree / "build", "-G", "Ninja"),
        f"-DCMAKE_MAKE_PROGRAM={TOOLS / 'ninja'}",
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind.cmake_dir()}",
    ]


def test_a_missing_compiler_is_named(tree: Path) -> None:
    """pip shows one sentence with the name of the package."""
    status, said = run(tree, str(TOOLS), *build(tree))
    assert status != 0
    assert "memlane needs a C++ compiler" in said
    assert "apt-get install g++" in said
    assert "CMAKE_CXX_COMPILER not set" not in said


def test_compiler_that_comes_later(tree: Path) -> None:
    """A missing tool is searched for again, in the same folder."""
    status, said = run(tree, str(TOOLS), *configure(tree))
    assert status != 0
    assert "memlane needs a C++ compiler" in said
    status, said = run(tree, f"{TOOLS}:{SYSTEM}", *configure(tree))
    assert status == 0, said


@pytest.mark.skipif(bool(unshare_refusal()), reason=unshare_refusal())
@pytest.mark.parametrize("how", [build, configure], ids=["pip", "cmake"])
def test_missing_headers_are_named(tree: Path, how: object) -> None:
    """The same for Python's headers."""
    assert callable(how)
    headers = sysconfig.get_path("include")
    hidden = f'mount -t tmpfs tmpfs {headers} && exec "$@"'
    inside = ("unshare", "-rm", "sh", "-c", hidden, "sh")
    status, said = run(tree, f"{TOOLS}:{SYSTEM}", *inside, *how(tree))
    assert status != 0
    assert "memlane needs the headers of Python" in said
    assert "apt-get install python3-dev" in said
    assert "list GET" not in said
