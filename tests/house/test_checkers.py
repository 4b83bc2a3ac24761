"""The tools that check the code find nothing."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.missing import needed

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent

CHECKERS = {
    "ruff": [BIN / "ruff", "check", "."],
    "ruff format": [BIN / "ruff", "format", "--check", "."],
    "mypy": [
        sys.executable,
        "-m",
        "mypy",
        "src",
        "examples",
        "benchmarks",
        "verification",
        "tests/support",
        "tests/typing",
        "release",
    ],
    "import-linter": [BIN / "lint-imports"],
    "import-linter, sessions": [
        BIN / "lint-imports",
        "--config",
        "tests/house/protocol.importlinter",
    ],
}


# mypy reads numpy's types, the stub names what the interpreter has: both differ between versions.
oldest = needed("CPython 3.11", sys.version_info[:2] == (3, 11))


@pytest.mark.parametrize(
    "checker", [pytest.param(name, marks=oldest if name == "mypy" else ()) for name in CHECKERS]
)
def test_checker_finds_nothing(checker: str) -> None:
    """Style, types (strict) and layers hold for the whole tree."""
    run = subprocess.run(CHECKERS[checker], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@oldest
def test_stub_of_the_native_module_is_current(tmp_path: Path) -> None:
    """The type stub matches the native module (`make stub` writes it)."""
    fresh = tmp_path / "_native.pyi"
    for command in (
        [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "memlane._native", "-o", fresh],
        [
            BIN / "ruff",
            "check",
            "-q",
            "--fix",
            "--ignore",
            "E501",
            "--config",
            ROOT / "pyproject.toml",
            fresh,
        ],
        [BIN / "ruff", "format", "-q", "--config", ROOT / "pyproject.toml", fresh],
    ):
        subprocess.run(command, check=True, cwd=ROOT)
    assert fresh.read_text() == (ROOT / "src/memlane/_native.pyi").read_text()
