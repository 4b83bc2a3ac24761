"""A process of an engine: its own modules over shells, and some functions of a file of scenarios.

`python -m tests.engines.scenario 0.33 NAME...`; the engine claims the version `TEST_VERSION`.
"""

import logging
import os
import sys
from importlib import import_module

from tests.engines import sources, stubs


def prepare(release: str) -> None:
    """Also in the processes that a scenario starts."""
    os.environ["TEST_RELEASE"] = release
    version = os.environ.get("TEST_VERSION", f"{release}.0")
    stubs.install(sources.engine(release), version)
    # As vLLM configures it: its own logger, and not the root.
    package = "sglang" if release == "0.5" else "vllm"
    log, lines = logging.getLogger(package), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False


if __name__ == "__main__":
    prepare(sys.argv[1])
    for name in sys.argv[2:]:
        print("scenario:", name, flush=True)
        getattr(
            import_module(
                "tests.engines.scenarios"
                if sys.argv[1] != "0.5"
                else "tests.engines.sglang_scenarios"
            ),
            name,
        )()
elif "TEST_RELEASE" in os.environ and not stubs.is_installed():
    prepare(os.environ["TEST_RELEASE"])
