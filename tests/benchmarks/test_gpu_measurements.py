"""The measurements of `make gpu`, dry: the whole plan on the stand-in, in small."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.gpu import compiled
from benchmarks.gpu.plan import DRY, steps

from tests.support.cuda import stand_in, with_runtime
from tests.support.gpus import StandIn
from tests.support.missing import needed

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def library() -> Path:
    return stand_in()


def test_a_dry_run_is_complete(tmp_path: Path) -> None:
    """Every step has every way's figures, or says why not; every way has moved every block."""
    (tmp_path / "tests.xml").write_text(
        '<testsuites><testsuite tests="9" failures="0" errors="0" skipped="2"/></testsuites>'
    )
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry", "--output", tmp_path]
    command += ["--tests", tmp_path / "tests.xml"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads((tmp_path / "gpu.json").read_text())
    assert not document["dropped"]
    assert [cell["kind"] for cell in document["cells"]] == [step.kind for step in steps(DRY)]
    for cell in document["cells"]:
        assert cell["failed"] == {}
        if not cell["direction"]:
            continue
        is_rows = cell["kind"] == "rows"
        assert {*cell["peers"], *cell["skipped"]} == {
            *(["copy_blocks"] if is_rows else document["ways"]),
            *(["ceiling"] if cell["kind"] != "beside a matmul" else []),
        }
        assert set(cell["skipped"]) == (set() if is_rows else {"vLLM"})
        assert cell["method"] == ("2d" if is_rows else "batch")
        rounds = [values for one in cell["peers"].values() for values in one.values()]
        assert all(len(values["rounds"]) == DRY.rounds for values in rounds)
    text = (tmp_path / "gpu.md").read_text()
    assert "9 tests, 0 failures, 0 errors, 2 skipped" in text
    assert text.count("| host to GPU | 32 KiB | 4 |") == 4


@pytest.mark.parametrize("size", [1, 15, 16, 100, 4096, 4097, 8208, 20_000])
def test_the_kernel_moves_every_byte(library: Path, size: int) -> None:
    """On this host, one thread after the other: aligned or not, on more and fewer warps."""

    def scene(_fake: Any) -> None:
        launch = StandIn(library).kernel()
        memory = np.random.default_rng(size).integers(0, 256, (2, 7, size + 3), np.uint8)
        for shift in (0, 1):
            source, target = memory[0, :, shift:], memory[1, :, 3 - shift :]
            expected = memory.copy()
            expected[1, :, 3 - shift : 3 - shift + size] = source[:, :size]
            places = np.array(
                [(source[i].ctypes.data, target[i].ctypes.data) for i in range(7)], np.int64
            )
            for grid in (1, 3):
                launch(grid, places.ctypes.data, 7, size, 0)
                assert (memory == expected).all()

    with_runtime(library, scene)


@needed("nvcc", shutil.which("nvcc") is not None)
def test_the_kernel_compiles(tmp_path: Path) -> None:
    """For an H100, without one and without NVRTC."""
    assert compiled.kernel_code("sm_90", tmp_path).startswith(b"\x7fELF")
    with pytest.raises(compiled.NotCompiled, match="nvcc: "):
        compiled.kernel_code("sm_0", tmp_path)
