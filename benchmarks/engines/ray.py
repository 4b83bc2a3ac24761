"""`python -m benchmarks.engines.ray [--rounds N]`: a driver and its Ray actors on one node."""

from __future__ import annotations

import argparse

from benchmarks import needs


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.ray", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    rounds = parser.parse_args().rounds
    needs.package("ray", "a comparison with its channels")
    from benchmarks.engines.channels import compare

    compare([1, 2, 4], rounds)


if __name__ == "__main__":
    main()
