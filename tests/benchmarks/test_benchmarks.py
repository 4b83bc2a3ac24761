"""The benchmarks' command lines: --help works, and a missing requirement is one sentence."""

import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from tests.support import Link, start

ROOT = Path(__file__).parents[2]
ALL = [
    "foundation",
    "broadcast",
    "store",
    "offload.startup",
    "offload.moving",
    "remote",
    "remote.relayed",
    "remote.scale",
    "awaiting",
    "bursts",
    "watching",
    "exporting",
    "gathering",
    "latest",
    "gpu",
    "tiers",
    "tiers.chain",
    "tiers.loops",
    "tiers.memory",
    "tiers.replayed",
    "tiers.redis",
    "tiers.mooncake",
    "tiers.objects",
    "engines",
    "engines.ray",
    "engines.sglang_groups",
    "engines.table",
    "figures",
    "figures.replaced",
    "figures.stuck",
    "workers",
]
# In the environment of another engine.
STARTED_BY_OTHERS = {"engines.client", "engines.seer", "engines.sglang_ranks"}
RUN_WITHOUT = """
import runpy, sys
name, missing = sys.argv[1:3]
sys.modules[missing] = None
sys.argv[1:] = sys.argv[3:]
runpy.run_module(name, run_name="__main__", alter_sys=False)
"""


def run(*command: object, **options: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        **options,  # type: ignore[call-overload]
    )


def test_all_are_here() -> None:
    """Every benchmark that can be started is in the list above."""
    found = {
        ".".join(path.relative_to(ROOT / "benchmarks").with_suffix("").parts)
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    found = {name.removesuffix(".__main__") for name in found}
    assert found == {*ALL, *STARTED_BY_OTHERS}


@pytest.mark.parametrize("name", ALL)
def test_every_benchmark_prints_help(name: str) -> None:
    """It prints help and measures nothing, with torch or without."""
    for missing in ([], ["torch"]):
        code, output, errors = start(helps, name, *missing, method="spawn").result()
        assert (code, errors) == (0, "")
        assert output.startswith("usage: ")


def helps(_link: Link, name: str, *missing: str) -> tuple[object, str, str]:
    """Role: the program with `--help`; its exit status, and what it printed."""
    sys.modules.update(dict.fromkeys(missing))  # type: ignore[arg-type]
    sys.argv[1:] = ["--help"]
    with (
        redirect_stdout(StringIO()) as output,
        redirect_stderr(StringIO()) as errors,
        pytest.raises(SystemExit) as ended,
    ):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
    return ended.value.code, output.getvalue(), errors.getvalue()


@pytest.mark.parametrize("name", ["store", "offload.moving", "gpu"])
def test_a_benchmark_without_torch_says_how_to_get_it(name: str) -> None:
    """It says that torch is missing, and how to get it."""
    done = run("-c", RUN_WITHOUT, f"benchmarks.{name}", "torch")
    assert done.returncode == 1
    assert "pip install torch" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_benchmark_without_its_native_programs_says_what_to_run(tmp_path: Path) -> None:
    """Without `make bench-peers` it says what to run."""
    code = "import benchmarks.needs as needs, pathlib, runpy; "
    code += f"needs.ROOT = pathlib.Path({str(tmp_path)!r}); "
    code += "runpy.run_module('benchmarks.foundation', run_name='__main__')"
    done = run("-c", code)
    assert done.returncode == 1
    assert "make bench-peers" in done.stderr
    assert len(done.stderr.splitlines()) == 1
