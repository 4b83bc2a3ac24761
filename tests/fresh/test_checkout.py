"""The README's commands set themselves up in any folder, with any pip and any `.venv`."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .checkout import Checkout

pytestmark = pytest.mark.soak(seconds=900)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout built by an old pip, in a folder whose path has blanks."""
    checkout = Checkout.new(tmp_path_factory.mktemp("a stranger") / "his checkout")
    made = checkout.run(sys.executable, "-m", "venv", ".venv")
    assert made.returncode == 0, made.stdout
    old = checkout.run(checkout.python, "-m", "pip", "install", "-q", "pip==23.0.1")
    assert old.returncode == 0, old.stdout
    checkout.make_demo()
    return checkout


def test_the_demo_runs_with_an_old_pip_and_a_blank_in_the_path(built: Checkout) -> None:
    """The demo ran; pip is still the old one, and torch was not needed."""
    version = built.run(built.python, "-m", "pip", "--version").stdout
    assert version.startswith("pip 23.0.1 ")
    assert built.run(built.python, "-c", "import torch").returncode == 1


def test_the_native_builds_work_with_a_blank_in_the_path(built: Checkout) -> None:
    """The C++ tests and the build with sync hooks work there, too."""
    built.make("native-build", "hooks")
    seen = built.run(
        built.python,
        "-c",
        "import memlane._native as n; print(n.__file__)",
        PYTHONPATH=str(built.folder / "build/hooks/site"),
    )
    assert seen.returncode == 0, seen.stdout


def test_nothing_is_set_up_twice(built: Checkout) -> None:
    """A second `make demo` runs the demo and nothing else."""
    assert "pip" not in built.make("demo")


def test_the_demo_runs_on_one_core(built: Checkout) -> None:
    """Six processes run on one core as on several."""
    made = built.run("taskset", "-c", "0", "make", "demo")
    assert made.returncode == 0, made.stdout


def test_a_copied_checkout_runs_its_own_code(built: Checkout, tmp_path: Path) -> None:
    """A copy runs its own code, not that of the original folder."""
    shutil.copytree(built.folder, tmp_path / "copy", symlinks=True)
    Checkout(tmp_path / "copy").make_demo()


def test_a_moved_checkout_is_built_anew(built: Checkout, tmp_path: Path) -> None:
    """A checkout that was moved after its build is built anew."""
    here = built.folder
    moved = Checkout(here.rename(tmp_path / "moved"))
    try:
        moved.make_demo()
    finally:
        moved.folder.rename(here)


@pytest.mark.parametrize("command", ["venv", "sync"])
def test_environment_made_by_uv(command: str, tmp_path: Path) -> None:
    """`uv venv` and `uv sync` make a `.venv` without pip."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "tools"], check=True)
    uv = tmp_path / "tools/bin/uv"
    subprocess.run([tmp_path / "tools/bin/pip", "install", "-q", "uv"], check=True)
    checkout = Checkout.new(tmp_path / "checkout")
    made = checkout.run(uv, command, "--python", sys.executable)
    assert made.returncode == 0, made.stdout
    checkout.make_demo()


def _old_python() -> Path | None:
    """An interpreter too old for memlane, if this machine has one."""
    places = [Path("/usr/bin"), *sorted(Path.home().glob(".pyenv/versions/3.*/bin"))]
    found = (place / f"python3.{minor}" for place in places for minor in (10, 9, 8, 7, 6))
    return next((path for path in found if path.exists()), None)


def test_python_that_is_too_old(tmp_path: Path) -> None:
    """Its version is refused first, and nothing is created."""
    if (python := _old_python()) is None:
        pytest.skip("there is no Python older than 3.11 here")
    checkout = Checkout.new(tmp_path / "checkout")
    made = checkout.run("make", f"PYTHON={python}", "demo")
    assert made.returncode == 2
    first = made.stdout.splitlines()[0]
    assert first.startswith("memlane needs Python 3.11 or later; ")
    assert not (checkout.folder / ".venv").exists()
