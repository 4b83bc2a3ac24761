"""MB/s of a disk tier and of others on one disk, in one run, alternating.

    python -m benchmarks.tiers [--path FOLDER] [--mib 256] [--rounds 5]

Where `make engines` has set up a vLLM, it runs there, so that vLLM's own tier is a row. The first
pass over new files is reported apart; the others are medians.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engines import environment
from benchmarks.machine import describe
from benchmarks.tiers.peers import PEERS

ROWS = (65536, 1 << 20)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--path", type=Path, help="a folder on the disk; default: the temporary one"
    )
    parser.add_argument("--mib", type=int, default=256, help="MiB in each pass")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each after the first")
    return parser.parse_args()


def in_vllm() -> None:
    """Goes on in vLLM's environment, if there is one."""
    if os.environ.get("MEMLANE_BENCH_HERE") or not environment.PYTHON.exists():
        return
    mixed = environment.HERE / "mixed-0.33"
    places = (mixed, environment.ROOT)
    path = os.pathsep.join(str(each) for each in places if each.exists())
    variables = {**os.environ, "PYTHONPATH": path, "MEMLANE_BENCH_HERE": "1"}
    command = [str(environment.PYTHON), "-m", "benchmarks.tiers", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=variables, check=False).returncode)


def aligned(rows: int, nbytes: int) -> Any:
    """Rows at a multiple of 4096, as a region's are, with contents."""
    memory = np.empty(rows * nbytes + 4096, np.uint8)
    first = -memory.ctypes.data % 4096
    made = memory[first : first + rows * nbytes].reshape(rows, nbytes)
    made[:] = np.random.default_rng(1).integers(0, 256, made.shape, np.uint8)
    return made


def run(row_bytes: int, direct: bool, options: argparse.Namespace) -> None:
    """One table."""
    place = tempfile.mkdtemp(prefix="memlane-tiers-", dir=options.path)
    peers, seen = {}, {}
    try:
        for name, make in PEERS.items():
            folder = Path(place) / make.__name__
            folder.mkdir()
            rows = aligned((options.mib << 20) // row_bytes, row_bytes)
            try:
                peers[name] = make(folder, rows, direct)
            except ImportError as error:
                print(f"without {name}: {error}", file=sys.stderr)
        seen = {name: [peer.passes()] for name, peer in peers.items()}
        for _ in range(options.rounds):
            for name, peer in peers.items():
                seen[name].append(peer.passes())
    finally:
        for peer in peers.values():
            peer.close()
        shutil.rmtree(place)
    print(f"\n{row_bytes >> 10} KiB rows, {'O_DIRECT' if direct else 'page cache'}, MB/s")
    print(f"{'':22} {'store':>8} {'load':>8}   first pass        beside memlane")
    own = medians(seen["memlane"][1:])
    for name, passes in seen.items():
        store, load = medians(passes[1:])
        first = f"{passes[0][0]:8.0f} {passes[0][1]:8.0f}"
        ratio = f"{own[0] / store:8.2f} {own[1] / load:8.2f}"
        print(f"{name:22} {store:8.0f} {load:8.0f} {first} {ratio}", flush=True)


def medians(passes: list[tuple[float, float]]) -> tuple[float, float]:
    """Returns the medians of storing and of loading."""
    stores, loads = zip(*passes, strict=True)
    return statistics.median(stores), statistics.median(loads)


def main() -> None:
    options = arguments()
    in_vllm()
    print(describe())
    for direct in (False, True):
        for row_bytes in ROWS:
            run(row_bytes, direct, options)


if __name__ == "__main__":
    main()
