"""`python -m memlane.tiers.replay`, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import PATIENCE

REQUESTS = [[1, 2, 3], [1, 2, 4], [9], [1, 2, 3]]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "memlane.tiers.replay", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    requests = ({"timestamp": 0, "hash_ids": ids, "input_length": 5} for ids in REQUESTS)
    return write(tmp_path / "trace.jsonl", *requests)


def test_counts_are_printed_as_json(trace: Path) -> None:
    """Integers, for the policies that were asked for, in one object on standard output alone."""
    done = run(trace, "--blocks", 4, "--policy", "lru,arc", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    lru = {"requests": 4, "accesses": 10, "hits": 4, "prefix_hits": 4, "stores": 6}
    assert (found["trace"], found["blocks"]) == (str(trace), 4)
    assert list(found["policies"]) == ["lru", "arc"]
    assert found["policies"]["lru"] == lru


def test_the_table_has_all_policies(trace: Path) -> None:
    done = run(trace, "--blocks", 4)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["policy", "lru", "arc", "s3fifo", "tuned"]
    assert rows[1][1:] == ["40.00", "%", "40.00", "%", "60.00", "%"]


@pytest.mark.parametrize(
    "line",
    [
        "not JSON",
        "[1]",
        "{}",
        '{"hash_ids": 1}',
        '{"hash_ids": ["a"]}',
        '{"hash_ids": [true]}',
        '{"hash_ids": [9223372036854775808]}',
    ],
)
def test_a_bad_trace_is_a_line(tmp_path: Path, line: str) -> None:
    """It says where."""
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"hash_ids": [1]}}\n{line}\n')
    done = run(path, "--blocks", 4)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{path}, line 2: " in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_trace_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        done = run(path, "--blocks", 4)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith(f"memlane.tiers.replay: cannot read {path}: ")
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    assert run(tmp_path / "bytes", "--blocks", 4).returncode == 2


@pytest.mark.parametrize(
    "options", [[], ["--blocks", "0"], ["--blocks", "x"], ["--blocks", "4", "--policy", "fifo"]]
)
def test_a_bad_option_is_refused(trace: Path, options: list[str]) -> None:
    done = run(trace, *options)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
