"""Plays functions of a scenario file in a process of an engine: `0.33 FILE NAME...`."""

import sys
from collections.abc import Sequence
from importlib import import_module


def play(arguments: Sequence[str]) -> None:
    """`arguments`: release, file, names."""
    # Not before: a process that plays many scenarios in turn has imported nothing of these.
    from tests.engines.scenario import prepare
    from tests.support import start_control

    start_control()
    release, file, *names = arguments
    prepare(release)
    scenarios = import_module(f"tests.engines.{file}")
    for name in names:
        print("scenario:", name, flush=True)
        getattr(scenarios, name)()


if __name__ == "__main__":
    play(sys.argv[1:])
