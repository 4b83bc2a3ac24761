"""A process of an engine: the engine's own modules over stubs."""

import logging
import multiprocessing
import os
from multiprocessing.context import ForkServerContext

from tests.engines import sources, stubs


def fresh_processes(scenarios: str) -> ForkServerContext:
    """Each process is new, with its scenarios' module, but does not have to import torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", scenarios])
    return context


def prepare(release: str) -> None:
    """Also in the processes that a scenario starts. The engine claims to be `TEST_VERSION`."""
    os.environ["TEST_RELEASE"] = release
    version = os.environ.get("TEST_VERSION", f"{release}.0")
    stubs.install(sources.engine(release), version)
    # As engines configure it: their own logger, and not the root.
    log, lines = logging.getLogger(sources.PACKAGES[release]), logging.StreamHandler()
    lines.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    log.propagate = False


if "TEST_RELEASE" in os.environ and not stubs.is_installed():
    prepare(os.environ["TEST_RELEASE"])
