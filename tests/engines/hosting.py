"""A pytest plugin: runs vLLM's own tests on its modules over stubs, switched to memlane."""

import multiprocessing
import signal
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import import_module
from types import FrameType

import pytest

import tests.engines.scenario
from memlane.engines.vllm import register
from tests.engines import sources
from tests.engines.left_out import LEFT_OUT

SECONDS = 900  # for one test, which takes seconds on an idle machine

tests.engines.scenario.prepare("0.33")
system_utils = import_module("vllm.utils.system_utils")
register()
# Their package has our package's name.
tests.__path__.append(str(sources.engine("0.33") / "tests"))
import_module("tests.engines.swapped_tiers").swap()
# Spawned processes would look for vLLM in vain.
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what is listed, and fails if something listed is not there any more."""
    stale = [p for p in LEFT_OUT if not any(fnmatchcase(item.name, p) for item in items)]
    if stale:
        raise pytest.UsageError(f"no test of vLLM's is left out by {stale}")
    out = [item for item in items if any(fnmatchcase(item.name, p) for p in LEFT_OUT)]
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        run = getattr(module, "distributed_run", None)
        if run is not None:  # it kills its processes after 60 s, which a busy machine can need
            run.__defaults__ = tuple(
                SECONDS if value == 60 else value for value in run.__defaults__
            )


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """vLLM's tests have this in a conftest of their own, which asks for all of vLLM."""
    return caplog


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """A test that hangs fails; the others go on."""

    def expire(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail("the test hangs")

    signal.signal(signal.SIGALRM, expire)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
