"""Plays functions of a scenario file in a process of an engine: `0.33 FILE NAME...`."""

import sys
from importlib import import_module

from tests.engines.scenario import prepare
from tests.support import start_control

start_control()
prepare(sys.argv[1])
scenarios = import_module(f"tests.engines.{sys.argv[2]}")
for name in sys.argv[3:]:
    print("scenario:", name, flush=True)
    getattr(scenarios, name)()
