"""Runs fuzz targets, several at once, each in its own process.

    python -m tests.fuzz [--seconds N] [--jobs N] [TARGET ...]

Every target replays its seeds and what earlier runs have found (build/fuzz/found), then continues
for N seconds. An input that causes a fault is minimised and written to build/fuzz/faults.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[2]
SEEDS = Path(__file__).parent / "seeds"
WORK = ROOT / "build/fuzz"
NATIVE = ROOT / "build/native/native/tests"
IN_CPP = ("segment", "ring", "store", "frames")
IN_PYTHON = ("serde", "queue", "objects", "handles")
_RECORD = 16


def command_of(target: str) -> list[str]:
    if target in IN_CPP:
        return [str(NATIVE / f"fuzz_{target}")]
    return [sys.executable, "-m", "tests.fuzz.engine", target]


def run(target: str, seconds: float) -> bool:
    """Returns whether it found nothing."""
    found, fault = WORK / "found" / target, WORK / "faults" / target
    found.mkdir(parents=True, exist_ok=True)
    fault.parent.mkdir(parents=True, exist_ok=True)
    fault.unlink(missing_ok=True)
    words = ["--seconds", str(seconds), "--found", str(found), "--crash", str(fault)]
    ended = _started([*command_of(target), *words, str(SEEDS / target), str(found)])
    if ended.returncode == 0:
        print(ended.stdout.strip(), flush=True)
        return True
    print(f"{target}: a fault, status {ended.returncode}\n{ended.stdout}{ended.stderr}", flush=True)
    if fault.exists():
        fault.write_bytes(_smallest(target, fault.read_bytes(), ended.returncode))
        print(f"{target}: the input is {fault}, {fault.stat().st_size} bytes", flush=True)
    return False


def _started(words: list[str]) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        words, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, errors="replace"
    )
    output, errors = process.communicate()
    for left in Path("/dev/shm").glob(f"memlane-fuzz-{process.pid}*"):
        left.unlink()
    return subprocess.CompletedProcess(words, process.returncode, output, errors)


def _smallest(target: str, content: bytes, status: int) -> bytes:
    """The same fault with fewer bytes: irrelevant parts removed, zeros for the rest."""
    with tempfile.TemporaryDirectory() as folder:
        trial, ignored = Path(folder) / "trial", str(Path(folder) / "ignored")

        def is_fault(changed: bytes) -> bool:
            trial.write_bytes(changed)
            only = [] if target in IN_CPP else ["--only"]
            ended = _started([*command_of(target), *only, "--crash", ignored, str(trial)])
            return ended.returncode == status

        if not is_fault(content):
            return content  # it takes more than one input, or luck
        step = max(_RECORD, len(content) // 2 // _RECORD * _RECORD)
        while step:
            for at in range(len(content) - step, -1, -step):
                for changed in (
                    content[:at] + content[at + step :],
                    content[:at] + bytes(step) + content[at + step :],
                ):
                    if changed != content and is_fault(changed):
                        content = changed
                        break
            step = 0 if step == 1 else max(1, step // 2)
        return content


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    options = parser.parse_args()
    targets = options.targets or [*IN_CPP, *IN_PYTHON]
    if unknown := set(targets) - {*IN_CPP, *IN_PYTHON}:
        parser.error(f"no such target: {', '.join(sorted(unknown))}")
    with ThreadPoolExecutor(options.jobs) as pool:
        results = list(pool.map(lambda target: run(target, options.seconds), targets))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
