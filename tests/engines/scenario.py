"""A process of an engine: the engine's own modules over stubs, and functions from a scenario file.

`python -m tests.engines.scenario 0.33 FILE NAME...`; the engine claims the version `TEST_VERSION`.
"""

import logging
import os
import sys
from importlib import import_module

from tests.engines import sources, stubs
from tests.support import start_control


def prepare(release: str) -> None:
    """Also in the processes that a scenario starts."""
    os.environ["TEST_RELEASE"] = release
    version = os.environ.get("TEST_VERSION", f"{release}.0")
    stubs.install(sources.engine(release), version)
    # As engines configure it: their own logger, and not the root.
    log, lines = logging.getLogger(sources.PACKAGES[release]), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False


if __name__ == "__main__":
    start_control()
    prepare(sys.argv[1])
    scenarios = import_module(f"tests.engines.{sys.argv[2]}")
    for name in sys.argv[3:]:
        print("scenario:", name, flush=True)
        getattr(scenarios, name)()
elif "TEST_RELEASE" in os.environ and not stubs.is_installed():
    prepare(os.environ["TEST_RELEASE"])
