"""SGLang's process groups on both queues: `python -m benchmarks.engines.sglang_groups`.

Uses the whole distribution without stubs, but no engine, because SGLang's scheduler imports
packages that exist for GPUs only. Runs in vLLM's environment (`environment.py`), which has most of
what SGLang imports.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.engines.environment import HERE, PYTHON, ROOT, install_into, set_up
from benchmarks.machine import describe

SIDES = {"SGLang's own": "", "memlane": "queue"}
FOLDER = HERE / "sglang"
PACKAGES = ("sglang==0.5.23", "orjson", "ipython", "traitlets")
NUMBERS = ("microseconds_per_object", "idle_cpu_of_a_reader", "seconds_to_the_error")


def run(side: str) -> dict[str, Any]:
    """Returns what the ranks reported, merged."""
    output = subprocess.run(
        [ROOT / "tests/own_shm.sh", PYTHON, Path(__file__).with_name("sglang_ranks.py")],
        env={
            **os.environ,
            "PYTHONPATH": str(FOLDER),
            "PYTHONDONTWRITEBYTECODE": "1",
            "SGLANG_USE_CPU_ENGINE": "1",
            "MEMLANE_SGLANG": SIDES[side],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    ).stdout
    told: dict[str, Any] = {}
    for line in output.splitlines():
        if line.startswith("@@"):
            told |= json.loads(line[2:])
    if "idle_cpu_of_a_reader" not in told:
        raise SystemExit(output)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.sglang_groups")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side")
    rounds = parser.parse_args().rounds
    set_up("0.32")
    install_into(FOLDER, *PACKAGES)
    print(f"SGLang 0.5.23, a group of 3 ranks, {describe()}")
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            runs[side].append(run(side))
    print(f"\n| medians of {rounds} | {' | '.join(SIDES)} |\n|---|---|---|")
    print(f"| the queue | {' | '.join(found[0]['queue'] for found in runs.values())} |")
    for name in NUMBERS:
        cells = []
        for found in runs.values():
            values = [told[name] for told in found if name in told]
            cells.append(f"{statistics.median(values):.2f}" if values else "none within 10 s")
        print(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    print(f"| its text | | {runs['memlane'][0].get('error')} |", flush=True)


if __name__ == "__main__":
    main()
