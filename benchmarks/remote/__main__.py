"""`python -m benchmarks.remote [--quick] [--rounds N]`."""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable

from benchmarks.machine import describe
from benchmarks.remote.channels import KINDS
from benchmarks.remote.measure import cpu_of, latency, rate
from benchmarks.turns import in_turns

KIB, MIB = 1 << 10, 1 << 20
SIZES = (256, 4 * KIB, 20_000, 256 * KIB, MIB, 8 * MIB, 64 * MIB)


def _name(nbytes: int) -> str:
    if nbytes % MIB == 0:
        return f"{nbytes // MIB} MiB"
    return f"{nbytes // KIB} KiB" if nbytes % KIB == 0 else f"{nbytes} B"


def _row(what: str, rounds: int, measure: Callable[[str], float], show: str) -> None:
    """Measures all kinds in turn; prints medians, and memlane's ratios to pyzmq."""
    values = in_turns(rounds, KINDS, measure)
    middle = {kind: statistics.median(found) for kind, found in values.items()}
    cells = [f"{middle[kind]:{show}}" for kind in KINDS]
    secure = middle["memlane CURVE"] / middle["pyzmq CURVE"]
    plain = middle["memlane plain"] / middle["pyzmq plain"]
    print(f"| {what} | {' | '.join(cells)} | {secure:.2f} | {plain:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.remote", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer messages, fewer sizes")
    parser.add_argument("--rounds", type=int, default=5, help="turns of every kind")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("rounds are positive")
    print(describe())
    print(f"\n| what | {' | '.join(KINDS)} | ratio CURVE | ratio plain |")
    print("|---|" + "---|" * (len(KINDS) + 2))
    count = 200 if arguments.quick else 1000
    _row("dict, one way, us", arguments.rounds, lambda kind: latency(kind, count), ".0f")
    many = 20_000 if arguments.quick else 100_000
    _row("256 B, CPU us", arguments.rounds, lambda kind: cpu_of(kind, 256, many), ".1f")
    for nbytes in SIZES[::2] if arguments.quick else SIZES:
        total = (32 if arguments.quick else 256) * MIB
        many = max(12, min(total // nbytes, 20_000))
        _row(
            f"{_name(nbytes)}, MB/s",
            arguments.rounds,
            lambda kind, nbytes=nbytes, many=many: rate(kind, nbytes, many) * nbytes / 1e6,  # type: ignore[misc]
            ".0f" if nbytes >= KIB else ".1f",
        )
    print(f"\nload after: {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
